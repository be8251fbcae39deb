"""The files tier: segments as files of a folder that several hosts mount."""
