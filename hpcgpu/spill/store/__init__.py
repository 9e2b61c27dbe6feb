"""The store: a mapping of keys to values that keeps them within the limits of its tiers."""
