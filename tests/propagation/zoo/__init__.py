"""Public architectures, tiny and by their idea, as users of Flax write them.

Each is a function of its inputs that makes its layers where it calls them, in a compact linen module.
"""

from tests.propagation.zoo import networks
from tests.propagation.zoo.parts import ZOO

__all__ = ["ZOO", "networks"]
