"""Read safetensors files: the length of a header, the header in JSON, the tensors' bytes."""

import json

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


def read(path):
    """All tensors of a file by their names, mapped into memory; those of bfloat16 as float32."""
    data = np.memmap(path, mode="r", dtype=np.uint8)
    size = int(data[:8].view("<u8")[0])
    header = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, about in header.items():
        begin, end = (8 + size + x for x in about["data_offsets"])
        if about["dtype"] == "BF16":
            tensor = (data[begin:end].view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            tensor = data[begin:end].view(DTYPES[about["dtype"]])
        tensors[name] = tensor.reshape(about["shape"])
    return tensors
