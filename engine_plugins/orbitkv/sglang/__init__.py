"""SGLang: this release has no adapter for it yet, only the entry point that says so."""
