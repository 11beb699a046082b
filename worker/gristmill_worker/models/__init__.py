"""Model directories: the manifest, import without torch, and decision heads."""
