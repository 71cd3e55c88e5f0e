"""What must hold of the code of every CUDA driver. Each check returns what is wrong, or nothing."""

from . import sass
from .cards import LARGEST_STATIC_SHARED, MOST_REGISTERS

# Drivers that compute in float64 although they read or write float32, and why.
_SUMS = "sums over a head that an error statement rests on"
_DRAWS = "probabilities and the numbers drawn against them"
_FIT = "a factorisation, whose rounding grows with the condition number"
_BACK = "the fit's cotangents, which are multiplied by the inverse of its normal matrix"
FLOAT64_BY_NATURE = {
    "pda_numba.apply_adjoint_tiles:_gather_ranges_cuda": _BACK,
    "pda_numba.apply_adjoint_tiles:_write_queries_cuda": _SUMS,
    "pda_numba.backward:_exact_rows_cuda": "products of cotangents and outputs that cancel",
    "pda_numba.backward:_judge_cuda": _SUMS,
    "pda_numba.certify:_compare_cuda": _SUMS,
    "pda_numba.certify:_judge_cuda": _SUMS,
    "pda_numba.certify:_measure_cuda": _SUMS,
    "pda_numba.certify:_sum_squares_cuda": _SUMS,
    "pda_numba.buckets:_choose_heavy_cuda": _SUMS,
    "pda_numba.buckets:_find_singles_cuda": _SUMS,
    "pda_numba.tree:_log_sizes_cuda": "the logarithm of a number of keys",
    "pda_numba.tree:_move_centres_cuda": "means of keys",
    "pda_numba.metric:_centre_cuda": _SUMS,
    "pda_numba.metric:_see_cuda": _SUMS,
    "pda_numba.content_adjoint:_owe_targets_cuda": "products of cotangents and outputs that cancel",
    "pda_numba.content_adjoint:_settle_queries_cuda": _SUMS,
    "pda_numba.trial:_peak_cuda": _SUMS,
    "pda_numba.trial:_rare_cuda": _SUMS,
    "pda_numba.core:_compare_cuda": _FIT,
    "pda_numba.core:_decompose_cuda": _FIT,
    "pda_numba.core:_judge_cuda": _FIT,
    "pda_numba.core:_table_cuda": _FIT,
    "pda_numba.dense:_multiply_cuda": _BACK,
    "pda_numba.dense:_scatter_cuda": _BACK,
    "pda_numba.finish:_flag_cuda": _DRAWS,
    "pda_numba.finish:_place_cuda": _SUMS,
    "pda_numba.fit_adjoint:_decompose_cuda": _FIT,
    "pda_numba.fit_adjoint:_gather_cuda": _BACK,
    "pda_numba.fit_adjoint:_slope_cuda": _BACK,
    "pda_numba.fit_adjoint:_subtract_cuda": _BACK,
    "pda_numba.holdout:_hold_out_cuda": _DRAWS,
    "pda_numba.landmarks:_average_cuda": "means of keys, which the landmarks are moved by",
    "pda_numba.landmarks:_pivot_cuda": _FIT,
    "pda_numba.landmarks:_pool_cuda": _DRAWS,
    "pda_numba.landmarks:_shrink_cuda": "means of keys, which the landmarks are moved by",
    "pda_numba.landmarks_adjoint:_to_keys_cuda": _BACK,
    "pda_numba.masked_adjoint:_settle_cuda": "products of cotangents and outputs that cancel",
    "pda_numba.near_adjoint:_near_cuda": _BACK,
    "pda_numba.pair:_roots_cuda": _FIT,
    "pda_numba.pair:_rotate_cuda": _FIT,
    "pda_numba.pair:_solve_cuda": _FIT,
    "pda_numba.pair:_stack_cuda": "rounds the projection from float64",
    "pda_numba.project:_project_cuda": "the products of the paper's variant, rounded once",
    "pda_numba.reach:_whiten_cuda": _FIT,
    "pda_numba.residuals:_number_cuda": "compares the probabilities that rows were drawn with",
    "pda_numba.sample:_weigh_candidates_cuda": _DRAWS,
    "pda_numba.scan:_fold_cuda": "squares of float32 may overflow",
    "pda_numba.scan:_scan_cuda": "squares of float32 may overflow",
}

# Of multiply-adds among the instructions of an inner product: those of float64 take two cycles on all of these cards.
LEAST_SHARE = {"FFMA": 0.6, "DFMA": 0.4}
LEAST_PRODUCTS = 64  # multiply-adds in a loop of products; the polynomial of exp has fewer


def complaints(code):
    """Everything that is wrong with one Code, in words."""
    if code.error:
        return [code.error]
    return [text for check in CHECKS for text in check(code)]


def stale(codes):
    """Exceptions that nothing needs any more."""
    needed = {code.launch.kernel for code in codes if _uses_float32(code) and code.count(r"\.f64")}
    return [f"{kernel} is listed as float64 by nature, but has none" for kernel in FLOAT64_BY_NATURE.keys() - needed]


def never_launched(drivers, launches):
    return sorted(set(drivers) - {launch.kernel for launch in launches})


def no_spills(code):
    if code.spilled:
        yield f"{code.spilled} bytes of registers spilled"


def no_local_memory(code):
    # Accumulators live in registers only if every index into them is known when compiling.
    in_ptx = code.count(r"\b(ld|st)\.local")
    in_sass = sum(i.opcode in ("LDL", "STL") for i in code.program.instructions)
    if in_ptx or in_sass or code.frame:
        yield f"local memory: a frame of {code.frame} bytes, {in_ptx} accesses in PTX, {in_sass} in machine code"


def no_float64(code):
    found = code.count(r"\.f64")
    if found and _uses_float32(code) and code.launch.kernel not in FLOAT64_BY_NATURE:
        yield f"{found} float64 instructions in a float32 driver"


def inner_products(code):
    """Drivers on tiles spend the innermost loops that do the work on multiply-adds."""
    if not code.on_tiles:
        return
    counts = [sass.opcodes(loop.own) for loop in code.program.loops() if not loop.inner]
    for name, least in LEAST_SHARE.items():
        for share in (count[name] / count.total() for count in counts if count[name] >= LEAST_PRODUCTS):
            if share < least:
                yield f"{name} is {share:.0%} of an inner loop, not {least:.0%}"
    if not any(count[name] >= LEAST_PRODUCTS for count in counts for name in LEAST_SHARE):
        yield "no inner loop of multiply-adds"


def vector_loads(code):
    # Where every array is strided the compiler does not always see that it is global: then by the generic instruction.
    kind = r"ld(\.global(\.nc)?)?\.v[24]\." if code.launch.other_loads else r"ld\.global(\.nc)?\.v[24]\."
    if code.on_tiles and not code.count(kind):
        yield "no vector loads from global memory"


def within_budget(code):
    if code.registers > MOST_REGISTERS:
        yield f"{code.registers} registers"
    if code.shared > LARGEST_STATIC_SHARED:
        yield f"{code.shared} bytes of shared memory"


CHECKS = (no_spills, no_local_memory, no_float64, inner_products, vector_loads, within_budget)


def _uses_float32(code):
    return any(text.startswith(("float32[", "float16[", "uint16[", "int16[")) for text in code.launch.types)
