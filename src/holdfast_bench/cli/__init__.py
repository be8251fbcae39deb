"""The commands of this package: `holdfast bench`, `demo` and `soak`."""
