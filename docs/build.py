"""Build the site into `_docs/` with packages alone: nbdev processes the notebooks, smalldocs renders them.

With Quarto, `nbdev_docs` builds the same pages from the same `nbs/_quarto.yml`. This script is for everybody else: nbdev's own commands
stop where Quarto is missing, so it calls their middle step, and it finishes what smalldocs leaves open, one function each below.
"""
import html, json, re, shutil, subprocess, sys
from pathlib import Path

from nbdev.config import get_config
from nbdev.serve import proc_nbs

PREFIX = r"\d+[a-zA-Z0-9]*_"                       # nbdev calls the page of 00_store.ipynb store.html

def nbdev_names(site: Path):
    "Give pages the names that nbdev's links expect, and return the old names with the new ones."
    names = {}
    for page in sorted(site.rglob("*.html")):
        new = page.with_name(re.sub("^" + PREFIX, "", page.name.lower()))
        if new == page: continue
        if new.exists(): sys.exit(f"{page.relative_to(site)} and another notebook both become {new.relative_to(site)}: rename one of the notebooks")
        page.rename(new)
        names[page.name] = new.name
    return names

def relink(text: str,   # a page, or the search index
           names: dict, # old file name -> new one
           home: str,   # the published address, which nbdev writes into its links
           up: str):    # from this page to the site's root: "", "../"
    "Point links at the new names, and at the site one is on instead of the published one."
    text = re.sub(rf'(href=")({re.escape(home)}/?)([^"]*")', lambda m: m[1] + (up + m[3] if m[3] != '"' else (up or "./") + '"'), text)
    return re.sub(rf'(?<=["/])({PREFIX}\w+\.html)(?=["#\\])', lambda m: names.get(m[1], m[1]), text)

def describe_images(text: str):
    "Give a figure without an alternative text the heading it stands under, and an inline drawing a role."
    heading = "this page"
    def one(m):
        nonlocal heading
        if m["h"]: heading = html.unescape(re.sub(r"<[^>]+>", "", m["h"])).strip() or heading
        elif m["img"] and not re.search(r'\balt="[^"]', m["img"]):
            return f'<img alt="Figure: {html.escape(heading)}"' + re.sub(r'\s*alt=""', "", m["img"])
        return m[0]
    return re.sub(r"<h[1-6][^>]*>(?P<h>.*?)</h[1-6]>|<img(?P<img>[^>]*>)", one, text, flags=re.S)

def scrollable(text: str):
    "Let a keyboard reach what scrolls sideways: wide tables and code."
    text = re.sub(r'<pre(?=[ >])(?![^>]*tabindex)', '<pre tabindex="0"', text)
    return re.sub(r'(<table\b[^>]*>.*?</table>)', r'<div class="scroll" tabindex="0">\1</div>', text, flags=re.S)

def finish(site: Path, home: str):
    "Everything after smalldocs, file by file."
    names = nbdev_names(site)
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(scrollable(describe_images(relink(page.read_text("utf-8"), names, home, up))), "utf-8")
    for index in ("search.json", "sitemap.xml"):
        if (site/index).exists(): (site/index).write_text(re.sub(rf"({PREFIX}\w+\.html)", lambda m: names.get(m[1], m[1]), (site/index).read_text("utf-8")), "utf-8")
    (site/".nojekyll").touch()

def main():
    cfg = get_config()
    work = proc_nbs(n_workers=2)
    built = work/cfg.doc_path.name
    subprocess.run([Path(sys.executable).with_name("smalldocs"), "render", "--quiet", work], check=True)
    finish(built, cfg.doc_host + cfg.doc_baseurl)
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(built, cfg.doc_path)
    print(f"{sum(1 for _ in cfg.doc_path.rglob('*.html'))} pages in {cfg.doc_path.name}/: python -m http.server -d {cfg.doc_path.name}")

if __name__ == "__main__": main()
