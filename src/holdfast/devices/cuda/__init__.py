"""Pages in GPU memory: kernels, driver calls, and the devices that use them."""
