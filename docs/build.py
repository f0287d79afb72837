"""Build the site into `_docs/` with packages alone: nbdev processes the notebooks, smalldocs renders them.

With Quarto, `nbdev_docs` builds the same pages from the same `nbs/_quarto.yml`. This script is for everybody else: nbdev's own commands
stop where Quarto is missing, so it calls their middle step, and it finishes what smalldocs leaves open, one function each below.
"""
import ast, html, json, os, re, shutil, subprocess, sys
from pathlib import Path

from nbdev.config import get_config
from nbdev.serve import proc_nbs

PREFIX = r"\d+[a-zA-Z0-9]*_"                       # nbdev calls the page of 00_store.ipynb store.html

def imports(code: str):
    "Does a cell import, and does it do nothing else? nbdev would run all of a cell that imports, for signatures that only exported cells have."
    try: tree = ast.parse(code)
    except SyntaxError: return False, False
    is_import = lambda node: isinstance(node, (ast.Import, ast.ImportFrom))
    return any(map(is_import, ast.walk(tree))), bool(tree.body) and all(map(is_import, tree.body))

def pieces(code: str) -> list[str]:
    "An exported cell, cut after each of its definitions but the last: nbdev would describe those of one cell in reverse, with the source between them."
    try: tree = ast.parse(code)
    except SyntaxError: return [code]
    ends = [n.end_lineno for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not n.name.startswith("_")][:-1]
    lines = code.splitlines()
    directives = [line for line in lines if line.startswith("#|")]
    parts = ["\n".join(lines[a:b]).strip("\n") for a, b in zip([0, *ends], [*ends, len(lines)])]
    return [parts[0], *("\n".join([*directives, part]) for part in parts[1:])]

def in_pieces(cells: list[dict]) -> list[dict]:
    "Cells, exported ones with several definitions cut up; what a cell gave stays with its last piece."
    out = []
    for cell in cells:
        text = "".join(cell["source"])
        exported = cell["cell_type"] == "code" and re.search(r"^#\|\s*export\s*$", text, re.M)
        *first, last = pieces(text) if exported else [cell["source"]]
        out += [{**cell, "id": f"{cell['id']}-{n}", "source": part, "outputs": []} for n, part in enumerate(first)] + [{**cell, "source": last}]
    return out

def for_readers(notebook: dict):
    "The notebook as the site shows it: exported code stays visible, text under the title stays, nothing but exported code runs."
    notebook["cells"] = in_pieces(notebook["cells"])
    titled, domain = False, "default_exp domains." in json.dumps(notebook)          # a domain's operations are what its page is about
    for cell in list(notebook["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and not titled and text.startswith("# "):
            titled = True
            head = re.match(r"# .*\n*(?:>.*\n?)*(?:\n*(?:- \S+:.*\n?)+)?", text)[0]     # nbdev keeps title, sentence and options of this cell, no more
            if rest := text[len(head):].strip():
                cell["source"] = head
                notebook["cells"].insert(notebook["cells"].index(cell) + 1, {"cell_type": "markdown", "id": "under-title", "metadata": {}, "source": rest})
        elif cell["cell_type"] == "code":
            shown = re.sub(r"^#\|\s*export\s*$", "#| exports", text, flags=re.M)
            some, only = imports(text)
            defines = shown != text and re.search(r"^(async )?(def|class) ", text, re.M) and not domain
            folded = f'#| code-fold: true\n#| code-summary: "{"Imports" if only else "Source"}"\n' if only or defines else ""
            cell["source"] = folded + (shown if shown != text or not some else "#| eval: false\n" + text)
    notebook["cells"].append({"cell_type": "markdown", "id": "end", "metadata": {}, "source": "<!-- end -->"})       # nbdev looks past an exported last cell
    return notebook

def copy_notebooks(source: Path, copy: Path, cache: Path):
    "`nbs/` as the site shows it, with the times of the sources, so that nbdev processes again only what changed."
    if copy.exists() and copy.stat().st_mtime < Path(__file__).stat().st_mtime: shutil.rmtree(copy), shutil.rmtree(cache, ignore_errors=True)
    copy.mkdir(parents=True, exist_ok=True)
    files = {p.relative_to(source) for p in source.rglob("*") if p.is_file() and ".ipynb_checkpoints" not in p.parts}
    for folder in (copy, cache):
        for old in [p for p in folder.rglob("*.ipynb") if p.relative_to(folder) not in files]: old.unlink()
    for name in files:
        old, new = source/name, copy/name
        if new.exists() and new.stat().st_mtime == old.stat().st_mtime: continue
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(old, new)
        if name.suffix != ".ipynb": continue
        new.write_text(json.dumps(for_readers(json.loads(old.read_text("utf-8")))), "utf-8")
        os.utime(new, (old.stat().st_atime, old.stat().st_mtime))
    os.utime(copy)

def nbdev_names(site: Path):
    "Give pages the names that nbdev's links expect, and return the old names with the new ones."
    names = {}
    for page in sorted(site.rglob("*.html")):
        new = page.with_name(re.sub("^" + PREFIX, "", page.name.lower()))
        if new.exists(): continue                  # already so, or taken by an earlier notebook
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

def order_headings(text: str):
    "No level is skipped: what nbdev writes of a function is an h3, also where no h2 stands above it."
    last = 1
    def one(m):
        nonlocal last
        last = min(int(m["level"]), last + 1)
        return f"<h{last}{m['rest']}</h{last}>"
    head, main, body = text.partition("<main")
    return head + main + re.sub(r"<h(?P<level>[2-6])(?P<rest>[ >].*?)</h(?P=level)>", one, body, flags=re.S)

def plain_signatures(text: str):
    "Leave out what nbdev says of a name whose signature Python does not know."
    text = re.sub(r"args:VAR_POSITIONAL, kwargs:VAR_KEYWORD", "...", text)
    text = re.sub(r'(<code class="sourceCode python">)\s*\n', r"\1", text)
    return text.replace("<p><em>Call self as a function.</em></p>", "")

def scrollable(text: str):
    "Let a keyboard reach what scrolls sideways: wide tables and code."
    text = re.sub(r'<pre(?=[ >])(?![^>]*tabindex)', '<pre tabindex="0"', text)
    return re.sub(r'(<table\b[^>]*>.*?</table>)', r'<div class="scroll" tabindex="0">\1</div>', text, flags=re.S)

def mend_anchors(site: Path):
    "nbdev links a method to an anchor of its own, which only documented ones have: such a link leads to the class."
    pages = {p: p.read_text("utf-8") for p in site.rglob("*.html")}
    known = {p: set(re.findall(r'\bid="([^"]+)"', text)) for p, text in pages.items()}
    for page, text in pages.items():
        def one(m):
            target = (page.parent/m[1]).resolve()
            return m[0] if target not in known or m[2] in known[target] else f'href="{m[1]}#{m[2].split(".")[0]}"'
        page.write_text(re.sub(r'href="([\w./-]+\.html)#([\w.-]+)"', one, text), "utf-8")

def finish(site: Path, home: str):
    "Everything after smalldocs, file by file."
    names = nbdev_names(site)
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = relink(page.read_text("utf-8"), names, home, up)
        for step in (describe_images, order_headings, plain_signatures, scrollable): text = step(text)
        page.write_text(text, "utf-8")
    mend_anchors(site.resolve())
    for sheet in site.rglob("themes/*.css"): sheet.write_text(re.sub(r"@import url\(https?:[^)]*\);", "", sheet.read_text("utf-8")), "utf-8")   # no fonts from elsewhere
    for index in ("search.json", "sitemap.xml"):
        if (site/index).exists(): (site/index).write_text(re.sub(rf"({PREFIX}\w+\.html)", lambda m: names.get(m[1], m[1]), (site/index).read_text("utf-8")), "utf-8")
    (site/".nojekyll").touch()

def main():
    cfg = get_config()
    copy = cfg.config_path/"build/nbs"
    copy_notebooks(cfg.nbs_path, copy, cfg.config_path/"_proc")
    work = proc_nbs(path=copy, n_workers=2)
    built = work/cfg.doc_path.name
    done = subprocess.run([Path(sys.executable).with_name("smalldocs"), "render", "--quiet", work], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if "output-file is not read" not in line]     # nbdev_names sees to it
    if told: print("\n".join(told), file=sys.stderr)
    if done.returncode: sys.exit(done.returncode)
    finish(built, cfg.doc_host + cfg.doc_baseurl)
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(built, cfg.doc_path)
    print(f"{sum(1 for _ in cfg.doc_path.rglob('*.html'))} pages in {cfg.doc_path.name}/: python -m http.server -d {cfg.doc_path.name}")

if __name__ == "__main__": main()
