"""Answer questions about one document, each time in a new process: python conversation.py MODEL TEXT

The first run reads the document; later ones, and other programs, fetch what it has read. Give it
the address of a node, `unix:///run/holdfast/node.sock`, to share contexts between programs.
"""

import sys
import time

import holdfast
from transformers import AutoModelForCausalLM, AutoTokenizer

model_folder, document = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(model_folder)
model = AutoModelForCausalLM.from_pretrained(model_folder)

with open(document) as file:
    prompt = file.read() + "\nQuestion: what is this about?\nAnswer:"
ids = tokenizer(prompt, return_tensors="pt").input_ids

if len(sys.argv) > 3:
    store = holdfast.open(sys.argv[3])
else:
    store = holdfast.open(host="1 GiB", disk="4 GiB", path="contexts")
with store:
    start_s = time.perf_counter()
    cache = holdfast.transformers.cache(model, ids, store)
    found = cache.prefix
    print(f"{ids.shape[1]} tokens: {found.fetched} fetched, {found.computed} computed, "
          f"{time.perf_counter() - start_s:.2f} s")
    out = model.generate(ids, past_key_values=cache, max_new_tokens=64)
    holdfast.transformers.save(model, out, cache, store)
print(tokenizer.decode(out[0, ids.shape[1] :]))
