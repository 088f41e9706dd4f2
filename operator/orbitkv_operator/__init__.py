"""The operator: turns ManagerPool and CacheNamespace objects into agents and their configuration."""
