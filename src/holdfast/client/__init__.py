"""Shared code of node clients: sessions, private node, hints, backoff, timing, weights digest.

The modules for engines log as `vllm.holdfast`, and their remedies name options of vLLM's connector:
vLLM shows only records of loggers below `vllm`, and no other engine has a connector yet.
"""
