"""Page memory on tensors: layout, headers, digests, packing and attention.

It owns what bytes in a KV page mean and how they are read.
It knows nothing of requests, logs, engines or IO: callers pass page numbers and tags.
"""
