"""Seeds as pure functions: every random choice has a name made of integers, and its seed is computed from it."""

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One integer in 0..2**31-2 from any integers; the same on every machine and in every process.

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014) over the numbers one after the other.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state = (state ^ (state >> 31)) + 0x9E3779B97F4A7C15 & _MASK
    return (state ^ (state >> 33)) % (2**31 - 1)
