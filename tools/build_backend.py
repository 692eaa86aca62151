"""The PEP 517 build backend: setuptools, with its wheels named after what was built and why.

pip hides all output of a build unless it is called with -v, but it prints the file name of the
wheel that it made. So the line that setup.py prints (tools/build_config.py) is put into that name
as the build tag, which installers use only to order otherwise equal wheels:
``shardcore-0.1.0-0_built_for_CPU_only_..._because_...-cp311-cp311-linux_x86_64.whl``.
"""

import json
import re
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import build_config  # lies beside this file: backend-path in pyproject.toml

try:
    from setuptools import build_meta
except ImportError:
    sys.exit(f"\n{build_config.no_setuptools([sys.prefix, *sys.path])}\n")
if find_spec("setuptools.command.bdist_wheel") is None and find_spec("wheel") is None:
    sys.exit(f"\n{build_config.NO_WHEEL}\n")

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_sdist = build_meta.build_sdist


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the wheel; returns its file name."""
    return _name_after_build(
        wheel_directory,
        build_meta.build_wheel(wheel_directory, config_settings, metadata_directory),
    )


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build in place and make the wheel that points here; returns its file name."""
    return _name_after_build(
        wheel_directory,
        build_meta.build_editable(wheel_directory, config_settings, metadata_directory),
    )


def _name_after_build(directory: str, name: str) -> str:
    """Rename the wheel, in its directory, to carry the line that setup.py recorded; returns the
    new name.
    """
    path = Path(directory, name)
    member = "shardcore/_C.build.json"
    # an editable wheel has no library: its record lies in the source tree
    with zipfile.ZipFile(path) as wheel:
        inside = member in wheel.namelist()
        record = json.loads(
            wheel.read(member)
            if inside
            else Path(__file__).parent.parent.joinpath(member).read_text()
        )
    distribution, version, *_, python, abi, platform = name.removesuffix(".whl").split("-")
    tag = re.sub(r"[^\w.]+", "_", record["line"].removeprefix("shardcore: "))[:160]
    new = f"{distribution}-{version}-0_{tag}-{python}-{abi}-{platform}.whl"
    path.rename(path.with_name(new))
    return new
