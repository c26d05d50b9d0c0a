"""The outside world: services and clients, data plane back ends, log stores, the command line.

Owns every socket, file and process boundary.
It may import `engine` and `lifecycle`; nothing of those imports it.
"""
