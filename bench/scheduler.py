"""x"""
from bench.figures import Figure
def run() -> list[Figure]:
    """x"""
    return []
