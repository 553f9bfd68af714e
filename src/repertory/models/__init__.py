"""Models: what acts and what judges. `base` is the contract, `networks` builds what is here."""
