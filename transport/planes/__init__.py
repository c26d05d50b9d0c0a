"""Back ends of `engine.dataplane.DataPlane`: how KV pages move between engines.

Owns regions, mappings, streams and the threads that copy.
It must not know requests, phases or the log: a grant is a string here.
"""
