"""Holds a wheel's module against the stable ABI of its tag by abi3audit, but for the buffer protocol's three functions.

They joined the stable ABI with 3.11. In 3.10 they are there, with the same Py_buffer, and tests of arrays run on 3.10.
"""

import json
import subprocess
import sys

KNOWN = {"PyObject_CheckBuffer", "PyObject_GetBuffer", "PyBuffer_Release"}


def main(wheel: str) -> int:
    # It ends with 1 for the three, too: the report says which.
    report = subprocess.run(["abi3audit", "--report", wheel], stdout=subprocess.PIPE, text=True).stdout
    (found,) = json.loads(report)["specs"].values()
    modules = found["wheel"]
    wrong = 0
    for module in modules:
        result = module["result"]
        newer = {name: since for name, since in result["future_abi3_objects"].items() if name not in KNOWN}
        if not result["is_abi3"] or result["non_abi3_symbols"] or newer:
            print(f"{module['name']}: outside of the stable ABI {result['non_abi3_symbols']}, newer {newer}")
            wrong += 1
    if not modules:
        print(f"{wheel} has no module of the stable ABI")
    elif not wrong:
        baseline = modules[0]["result"]["baseline"]
        print(f"{modules[0]['name']} keeps to the stable ABI of {baseline}, but for {sorted(KNOWN)}")
    return 1 if wrong or not modules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
