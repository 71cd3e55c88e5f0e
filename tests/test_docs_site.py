"""The built documentation: no link leads nowhere, nothing comes from the network, and a browser shows every page well.

The browser's part needs selenium with chromium and chromedriver (`pip install ".[site]"`), and is skipped without.
"""

import html.parser
import re
import shutil
import urllib.parse
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
WIDTHS = (1280, 390)  # a desktop's and a telephone's

# What a page looks like to its reader: what sticks out, formulas that are not drawn, pictures that did not load.
LOOK = """
const width = document.documentElement.clientWidth
const wide = [...document.querySelectorAll("article *")].filter(x => x.getBoundingClientRect().right > width + 1)
const hides = x => getComputedStyle(x).overflowX !== "visible"
const scrolls = x => x.tagName !== "ARTICLE" && (hides(x) || scrolls(x.parentElement))
const formulas = [...document.querySelectorAll("math")]
return {
  scroll: document.documentElement.scrollWidth, width,
  wide: wide.filter(x => !scrolls(x)).map(x => x.outerHTML.slice(0, 200)),
  formulas: formulas.length,
  empty: formulas.filter(x => !x.getBoundingClientRect().width || !x.getBoundingClientRect().height).length,
  left: [...document.querySelectorAll(".math")].filter(x => !x.querySelector("math")).length,
  errors: document.querySelectorAll("merror").length,
  broken: [...document.images].filter(x => x.complete && !x.naturalWidth && x.src).map(x => x.src),
}
"""

TOO_WIDE = "<div style='width: 2000px; height: 9px'></div>"


class Page(html.parser.HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical",) and found.get("href"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{path: Page} of a fresh build, in which warnings are errors."""
    for name in ("furo", "numpydoc", "latex2mathml"):
        pytest.importorskip(name)
    build = pytest.importorskip("sphinx.cmd.build")
    folder = tmp_path_factory.mktemp("site")
    assert build.main(["-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]) == 0
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def problem_of(path, target, site):
    """What is wrong with a link from a page, if anything."""
    parts = urllib.parse.urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    place = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
    if not place.is_file():
        return f"{path.name}: {target} is no file"
    if parts.fragment and place in site and urllib.parse.unquote(parts.fragment) not in site[place].anchors:
        return f"{path.name}: {target} has no such anchor"
    return None


def test_every_link_leads_somewhere(site):
    assert len(site) > 20
    wrong = {problem_of(path, target, site) for path, page in site.items() for target in page.links + page.loaded}
    assert wrong == {None}
    path = next(iter(site))
    assert problem_of(path, "nowhere.html", site)
    assert problem_of(path, "#nowhere", site)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pda_numba/data/README.md"])
def test_links_of_other_pages(name):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text())
    near = [link for link in links if not urllib.parse.urlsplit(link).scheme]
    assert [link for link in near if not ((ROOT / name).parent / link).exists()] == []


def test_nothing_comes_from_the_network(site):
    outside = [(path.name, x) for path, page in site.items() for x in page.loaded if urllib.parse.urlsplit(x).netloc]
    assert outside == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium, with no network but files."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium with chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        profile,
        offline,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield running
    running.quit()


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_in_a_browser(site, browser, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wrong, formulas = [], 0
    for path in site:
        browser.get(path.as_uri())
        look = browser.execute_script(LOOK)
        formulas += look["formulas"]
        said = [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        trouble = [*said, *look["broken"], *look["wide"]]
        if look["scroll"] > look["width"]:
            trouble.append(f"{look['scroll']} pixels wide")
        if look["empty"] or look["left"] or look["errors"]:
            trouble.append(f"formulas: {look['empty']} empty, {look['left']} not drawn, {look['errors']} errors")
        wrong += [f"{path.name}: {x}" for x in trouble]
    assert formulas > 100
    assert wrong == []
    browser.execute_script("document.querySelector('article').insertAdjacentHTML('beforeend', arguments[0])", TOO_WIDE)
    assert len(browser.execute_script(LOOK)["wide"]) == 1  # it would be seen
