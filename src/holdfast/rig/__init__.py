"""Real engines, small models and reports: what the demo and the benchmarks run on."""
