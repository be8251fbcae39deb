"""Other KV stores (peers): start their servers and measure them with their own clients."""
