"The package is what the notebooks export, the notebooks are clean, the README is its notebook. Works on a copy, so that nothing is lost."
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def different(ours: Path, fresh: Path, pattern: str) -> list[str]:
    "Files that differ or stand on one side only."
    names = {p.relative_to(side) for side in (ours, fresh) for p in side.rglob(pattern) if "__pycache__" not in p.parts and ".ipynb_checkpoints" not in p.parts}
    return sorted(str(n) for n in names if not ((ours / n).exists() and (fresh / n).exists() and filecmp.cmp(ours / n, fresh / n, shallow=False)))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("settings.ini", "setup.py", "pyproject.toml"): shutil.copy(ROOT / name, copy)
        shutil.copytree(ROOT / "nbs", copy / "nbs")
        subprocess.run(["git", "init", "-q", "."], cwd=copy, check=True)
        subprocess.run([BIN / "nbdev_export"], cwd=copy, check=True)
        package = different(ROOT / "granite", copy / "granite", "*.py")
        subprocess.run([BIN / "nbdev_clean"], cwd=copy, check=True)
        notebooks = different(ROOT / "nbs", copy / "nbs", "*.ipynb")
        subprocess.run([BIN / "jupyter", "nbconvert", "--log-level=ERROR", "--to", "markdown", "--no-input", "--output-dir", copy, "--output", "README.md", copy / "nbs/index.ipynb"], check=True)
        readme = (ROOT / "README.md").read_text(encoding="utf-8") != (copy / "README.md").read_text(encoding="utf-8")
    for name in package: print(f"granite/{name}: not what the notebooks export; run nbdev_export, or nbdev_update after a fix in the package")
    for name in notebooks: print(f"nbs/{name}: not clean; run nbdev_clean")
    if readme: print("README.md: not what nbs/index.ipynb gives; run make readme")
    return 1 if package or notebooks or readme else 0


if __name__ == "__main__": sys.exit(main())
