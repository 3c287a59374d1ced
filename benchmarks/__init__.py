"""One file per claim; each prints one JSON object as its last line."""
