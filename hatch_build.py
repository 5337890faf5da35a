"""Build hook: compiles the CPU kernels into the wheel, or beside their sources for an editable install.

Without a C++ compiler the build goes on: the engine then compiles the kernels on first use, or computes with torch.
"""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src/headwater/engines/native/cpu")


class KernelBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _load(Path(self.root, _FOLDER, "build.py"))
        name = build.library_name()
        editable = version == "editable"
        self._temporary = None if editable else tempfile.TemporaryDirectory(prefix="headwater-kernels-")
        target = Path(self.root, _FOLDER, name) if self._temporary is None else Path(self._temporary.name, name)
        try:
            build.build_library(target)
        except (build.BuildError, OSError) as error:
            self.app.display_warning(f"CPU kernels not built: {error}")
            return
        if editable:
            for stale in set(target.parent.glob("kernels-*.so")) - {target}:
                stale.unlink()
        else:
            package_path = _FOLDER.relative_to("src") / name
            build_data["force_include"][str(target)] = str(package_path)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        temporary = getattr(self, "_temporary", None)
        if temporary is not None:
            temporary.cleanup()


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("headwater_kernel_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
