"""Which sharding every value has on every submesh, decided before anything compiles."""
