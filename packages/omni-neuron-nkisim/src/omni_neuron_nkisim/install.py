# SPDX-License-Identifier: Apache-2.0
"""Puts the simulator in place of `nki`, where the real one does not import and somebody asks for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from omni_neuron_nkisim import collectives, constants, isa, language
from omni_neuron_nkisim.configuration import current_settings
from omni_neuron_nkisim.launch import Kernel, jit, simulate

INSTALL_VARIABLE = "OMNI_NEURON_NKISIM"
_MARK = "__omni_neuron_nkisim__"
_shadowed: dict[str, ModuleType] = {}


class _ShapeAnnotation:
    """`nki.typing.tensor[128, 512]`: an annotation that nothing checks."""

    def __getitem__(self, shape: Any) -> Any:
        return Any


def _module(
    name: str, doc: str, contents: dict[str, Any], computed: dict[str, Callable[[], Any]] | None = None
) -> ModuleType:
    """A module of `contents`, and of what is `computed` each time it is asked for."""
    module = ModuleType(name, doc)
    module.__spec__ = ModuleSpec(name, None)  # without one, importlib.util.find_spec raises
    module.__dict__.update(contents)
    module.__dict__["__all__"] = sorted(contents)
    module.__dict__[_MARK] = True

    def missing(attribute: str) -> Any:
        if computed and attribute in computed:
            return computed[attribute]()
        raise AttributeError(
            f"{name} has no {attribute!r} in the simulator (omni_neuron_nkisim); it has {', '.join(sorted(contents))}"
        )

    module.__dict__["__getattr__"] = missing
    return module


def _modules() -> dict[str, ModuleType]:
    enumerations = {
        name: value for name, value in vars(constants).items() if isinstance(value, type) and name != "Enum"
    }
    parts = {
        "nki.language": _module("nki.language", "Simulated nki.language.", language.NAMES),
        "nki.isa.constants": _module("nki.isa.constants", "Simulated nki.isa.constants.", enumerations),
        "nki.collectives": _module(
            "nki.collectives",
            "Simulated nki.collectives.",
            {name: getattr(collectives, name) for name in collectives.__all__},
        ),
        "nki.typing": _module("nki.typing", "Simulated nki.typing.", {"tensor": _ShapeAnnotation()}),
    }
    instructions = {name: getattr(isa, name) for name in isa.__all__}
    parts["nki.isa"] = _module(
        "nki.isa", "Simulated nki.isa.", {**instructions, "constants": parts["nki.isa.constants"]}
    )
    contents = {
        "Kernel": Kernel,
        "jit": jit,
        "simulate": simulate,
        **{name.removeprefix("nki."): part for name, part in parts.items() if name != "nki.isa.constants"},
    }
    version = {"__version__": lambda: current_settings().nki_version}
    top = _module("nki", "NKI as simulated by omni_neuron_nkisim; nothing is compiled.", contents, version)
    top.__dict__["__path__"] = []
    return {"nki": top, **parts}


def is_installed() -> bool:
    """Whether `import nki` gives the simulator."""
    return hasattr(sys.modules.get("nki"), _MARK)


def _real_nki() -> bool:
    """Whether a real `nki` imports. The package index has a placeholder of that name that raises or holds nothing."""
    before = set(sys.modules)
    try:
        module = importlib.import_module("nki")
        language_module = importlib.import_module("nki.language")
        real = hasattr(module, "jit") and hasattr(language_module, "ndarray")
    except Exception:
        real = False
    if not real:
        for name in set(sys.modules) - before:
            if name == "nki" or name.startswith("nki."):
                del sys.modules[name]
    return real


def install() -> bool:
    """Make `import nki`, `nki.language`, `nki.isa`, `nki.collectives` and `nki.typing` give the simulator.

    Returns:
        Whether the simulator is in place: False where a real `nki` imports, which is then left alone.
    """
    if is_installed():
        return True
    if _real_nki():
        return False
    for name, module in _modules().items():
        if name in sys.modules:
            _shadowed[name] = sys.modules[name]
        sys.modules[name] = module
    return True


def uninstall() -> None:
    """Take the simulator out of `sys.modules` again; modules that imported it keep what they have."""
    for name in [name for name in sys.modules if name == "nki" or name.startswith("nki.")]:
        if hasattr(sys.modules[name], _MARK):
            del sys.modules[name]
    sys.modules.update(_shadowed)
    _shadowed.clear()


def install_if_asked() -> None:
    """Install where OMNI_NEURON_NKISIM is 1; called when the package is imported.

    Raises:
        ValueError: the variable is neither 0 nor 1 nor empty.
    """
    value = os.environ.get(INSTALL_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{INSTALL_VARIABLE}={value!r} is not valid: it takes 0 or 1")
    if value == "1":
        install()
