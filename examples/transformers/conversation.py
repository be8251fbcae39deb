"""Answer a question about a document, each time in a new process.

python conversation.py MODEL DOCUMENT [--node unix:///run/holdfast/node.sock]

The first run reads the document; later ones, and other programs that use the node, fetch what it
has read.
"""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("document", type=Path)
parser.add_argument("--question", default="What is this about?")
parser.add_argument("--node", help="address of a node; by default contexts are in ./contexts")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model)
prompt = f"{args.document.read_text()}\nQuestion: {args.question}\nAnswer:"
ids = tokenizer(prompt, return_tensors="pt").input_ids

if args.node:
    store = holdfast.open(args.node)
else:
    store = holdfast.open(host="1 GiB", disk="4 GiB", path="contexts")
with store:
    start_s = time.perf_counter()
    cache = holdfast.transformers.cache(model, ids, store)
    found, took_s = cache.prefix, time.perf_counter() - start_s
    print(f"{found.fetched} tokens fetched, {found.computed} computed in {took_s:.2f} s")
    out = model.generate(ids, past_key_values=cache, max_new_tokens=64)
    holdfast.transformers.save(model, out, cache, store)
print(tokenizer.decode(out[0, ids.shape[1] :]))
