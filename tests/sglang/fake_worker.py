"""Stands in for the SGLang process of the one_batch bench: the same orders, answers without SGLang."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import numpy as np

connection = Connection(int(sys.argv[1]))
flags = sys.argv[2:]
flag = flags[flags.index("--cuda-graph-backend-prefill") + 1]
ours = os.environ["SPARSE_PCG_SGLANG"] == "1"
print(f"INFO sparse_pcg: {flag} 7 cuts" if ours else "INFO nothing to say", flush=True)
if os.environ.get("FAKE_FAILS") == f"{flag}_{'on' if ours else 'off'}":
    sys.exit("no memory left")
connection.send((True, {"backend": "Fake", "load_s": 1.0}))
prefills = 0
while (order := connection.recv()) is not None:
    what, arguments = order
    if what == "prefill_ms":
        prefills += 1
        slow = 100.0 if prefills <= 2 else float(prefills % 3)  # both sizes of the first turn
        connection.send((True, slow + arguments["size"] / (2 if ours else 1)))
    elif what == "memory":
        connection.send((True, {"peak_reserved_bytes": 1}))
    elif what == "prompt" and flag == "breakable" and arguments["prefix"] == 30:
        connection.send((False, "ValueError: of this prompt"))
    else:
        logits = np.full((len(arguments["new"]), 4), 1.01 if ours else 1.0, np.float32)
        blind = flag == "tc_piecewise" and arguments["prefix"] == 1900
        answer = {"logits": logits, "finite": True, "again_relative_l2": 0.5, "context_moves": 0.0 if blind else 1.0}
        connection.send((True, answer))
