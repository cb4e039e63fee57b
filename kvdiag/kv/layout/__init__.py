"""Cache layout: layers, groups, pages, blocks, capacity."""
