"""The built site as a reader meets it: every page of `_docs/` in headless Chromium, and what a reader would stumble over.

Needs `make docs` before, chromium and npm; screenshots of five pages go to build/site/shots for somebody to look at.
"""
import functools, http.server, json, os, re, shutil, subprocess, threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SITE, HERE, WORK = ROOT/"_docs", ROOT/"tests/site", ROOT/"build/site"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)

def why_not():
    "The reason to skip, or None."
    if not (SITE/"index.html").exists() and not (SITE/"store.html").exists(): return "no site in _docs: make docs"
    newest = max(ROOT.glob("nbs/**/*.ipynb"), key=lambda p: p.stat().st_mtime)
    if newest.stat().st_mtime > (SITE/".nojekyll").stat().st_mtime: return f"_docs is older than {newest.relative_to(ROOT)}: make docs"
    if not CHROMIUM: return "no chromium on this machine"
    if not shutil.which("npm"): return "no npm on this machine"

def node_modules():
    "axe-core and puppeteer-core at their pinned versions, installed once."
    WORK.mkdir(parents=True, exist_ok=True)
    wanted = (HERE/"package.json").read_text()
    if not (WORK/"node_modules").exists() or (WORK/"package.json").read_text() != wanted:
        (WORK/"package.json").write_text(wanted)
        done = subprocess.run(["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"], cwd=WORK, timeout=300, capture_output=True, text=True)
        if done.returncode: pytest.skip(f"npm could not install axe-core: {done.stderr.strip().splitlines()[-1:]}")
    return WORK

@pytest.fixture(scope="module")
def walked():
    "What the walk found, by page: the address, and for each page its links, texts, images, errors."
    if reason := why_not(): pytest.skip(reason)
    modules, shots = node_modules(), WORK/"shots"
    shots.mkdir(exist_ok=True)
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    pages = os.environ.get("GRANITE_SITE_PAGES", "").split() or sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
    done = subprocess.run(["node", HERE/"walk.mjs", origin, CHROMIUM, modules, shots, *pages], capture_output=True, text=True, timeout=1800)
    server.shutdown()
    assert done.returncode == 0, done.stderr[-2000:]
    (WORK/"report.json").write_text(done.stdout)
    report = json.loads(done.stdout)
    return origin, report.pop("search"), report

def bad(report, key): return {page: found[key] for page, found in report.items() if found[key]}

def test_no_console_errors(walked): assert not bad(walked[2], "errors")
def test_nothing_left_as_text(walked): assert not bad(walked[2], "raw")
def test_images_load_and_are_described(walked): assert not bad(walked[2], "unloaded") and not bad(walked[2], "noalt")
def test_fits_a_phone(walked): assert not bad(walked[2], "overflow")
def test_contrast_and_headings(walked): assert not bad(walked[2], "axe")
def test_contrast_when_dark(walked): assert not bad(walked[2], "axeDark")
def test_dark_is_dark(walked):
    for page, found in walked[2].items(): assert sum(map(int, re.findall(r"\d+", found["dark"])[:3])) < 200, page

def test_every_page_says_something(walked):
    for page, found in walked[2].items(): assert found["title"] and found["sizes"] > 200, page

def test_links(walked):
    origin, _, report = walked
    broken = []
    for page, found in report.items():
        for link in found["links"]:
            url, anchor = urldefrag(link)
            if not url.startswith(origin): continue
            target = unquote(url[len(origin):]).lstrip("/") or "index.html"
            if not (SITE/target).is_file(): broken.append((page, target))
            elif anchor and target in report and unquote(anchor) not in report[target]["ids"]: broken.append((page, f"{target}#{anchor}"))
    assert not broken

def test_own_links_stay_on_the_site(walked):
    home = re.search(r'site-url: "(.*)"', (ROOT/"nbs/nbdev.yml").read_text())[1]
    assert not {page: [l for l in found["links"] if l.startswith(home)] for page, found in walked[2].items() if any(l.startswith(home) for l in found["links"])}

def test_search_finds_ArgAcc(walked):
    search = walked[1]
    assert not search["errors"] and not search["axe"] and any("ArgAcc" in hit for hit in search["hits"]), search
    assert all((SITE/re.sub(r"[#?].*", "", hit.split()[0])).is_file() for hit in search["hits"])

def test_quarto_and_nbdev_agree_with_the_sources():
    "What Quarto's nbdev_docs would read: the same files, not overwritten, and every notebook in the sidebar."
    import yaml
    from nbdev.config import get_config
    cfg, contents = get_config(cfg_name="settings.ini", path=ROOT), yaml.safe_load((ROOT/"nbs/sidebar.yml").read_text())["website"]["sidebar"]["contents"]
    entries = []
    def walk(items):
        for item in [items] if isinstance(items, str) else items:
            if isinstance(item, str): entries.append(item)
            elif "href" in item: entries.append(item["href"])
            if isinstance(item, dict): walk(item.get("contents", []))
    walk(contents)
    listed = {p for e in entries for p in (ROOT/"nbs").glob(e)}
    assert {p for p in (ROOT/"nbs").glob("**/*.ipynb") if ".ipynb_checkpoints" not in p.parts} == listed
    assert yaml.safe_load((ROOT/"nbs/nbdev.yml").read_text())["website"]["site-url"] == cfg.doc_host + cfg.doc_baseurl
    assert cfg.custom_sidebar in (True, "True"), "nbdev would write over nbs/sidebar.yml"
