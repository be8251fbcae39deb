"""The node over HTTP: metrics for Prometheus, health for probes, and a status page for people."""
