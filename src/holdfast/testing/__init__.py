"""What ships for those who prove a tier: contracts, faults, payloads, the store against a dict."""
