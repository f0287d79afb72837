"Everything comes from settings.ini; pyproject.toml (written by nbdev_export) names the fields that this file fills."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"], author_email=cfg["author_email"], license="Apache-2.0", keywords=cfg["keywords"],
    url=cfg["git_url"], python_requires=">=" + cfg["min_python"],
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research", "Natural Language :: English", "Programming Language :: Python :: 3.11"],
    packages=find_packages(include=["granite", "granite.*"]), include_package_data=True,
    data_files=[("share/granite/published", sorted(map(str, Path("nbs/published").iterdir())))],
    install_requires=cfg["requirements"].split(),
    extras_require={name: cfg[f"{name}_requirements"].split() for name in ("dev", "hf", "ray", "inspect")},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": ["granite=granite._modidx:d"]},
    zip_safe=False,
)
