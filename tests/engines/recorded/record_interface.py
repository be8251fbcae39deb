"""Record what an installed engine has of the interfaces that bindings use, as JSON.

    python tests/engines/recorded/record_interface.py NAME VERSION MODULE:TABLE... >FILE.json

Run it with the Python, or the PYTHONPATH, of the engine. `test_recorded_interfaces.py` compares the
bindings with these records, so an engine or a version that is not installed is compared, too.
"""

import importlib
import inspect
import json
import sys

from holdfast.engines.interface import names_of


def record(path, expected):
    """Return of one class what a binding looks at, and all methods of one that it implements."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    methods = {}
    for method in (*expected.methods, *expected.newer):
        function = inspect.getattr_static(found, method, None)
        if function is None and method in expected.newer:
            continue
        static = isinstance(function, staticmethod)
        parameters = inspect.signature(getattr(function, "__func__", function)).parameters
        methods[method] = list(parameters)[0 if static else 1 :]
    names = names_of(found)
    return {
        "methods": methods,
        "names": sorted(name for name in (*expected.fields, *expected.attributes) if name in names),
        "fields": sorted(inspect.get_annotations(found)) if expected.exactly else [],
        "abstract": sorted(getattr(found, "__abstractmethods__", ())) if expected.abstract else [],
        "hooks": sorted(hooks_of(found)) if expected.abstract else [],
    }


def hooks_of(found):
    """Yield the methods and properties of a class that a binding may replace."""
    for name, given in vars(found).items():
        value = given.fget if isinstance(given, property) else getattr(given, "__func__", given)
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            yield name


def main(engine, version, *tables):
    found = {}
    for table in tables:
        module, _, name = table.partition(":")
        interface = getattr(importlib.import_module(module), name)
        found[table] = {path: record(path, expected) for path, expected in interface.items()}
    json.dump({"engine": engine, "version": version, "tables": found}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
