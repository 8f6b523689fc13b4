"""Steps that do with less: outputs that are left out, modules in tiles, and where that is worth it."""
