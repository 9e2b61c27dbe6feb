"""Settings from text: values and their checks, the layers, the run document, sites, and names of other packages.

Every leader and rank imports it, so nothing but json is imported here: a validator such as msgspec costs 10 to 30 ms
of CPU.
"""

from hpcgpu.config.document import read_document, render_document

__all__ = ["read_document", "render_document"]
