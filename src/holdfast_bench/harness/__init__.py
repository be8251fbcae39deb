"""Benchmark harness: processes, nodes, pools, engines, models and noise control for benches."""
