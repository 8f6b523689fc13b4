"""Self-contained HTML pages: one on a run, one that compares runs. They open from disk and load nothing."""
