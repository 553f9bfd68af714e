"""Where roles run. `base` is what an algorithm knows of it; each other module is one runtime."""
