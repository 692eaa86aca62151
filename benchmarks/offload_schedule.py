"""How long a training step with offloaded states takes, by schedule, from the times of its parts: pure arithmetic.

A step has `micro_steps` forwards and backwards. Gradients go to host memory as backward makes them, Adam runs there, the new
weights come back. All is cut into `chunks` equal parts (units), so that parts can overlap; within one resource (the device,
each direction of the link, the CPU) they run one after the other.

Weights may change only when backward has ended, as clipping needs the norm of all gradients. From then on Adam can take the
chunks whose gradients have arrived, while the others arrive.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parts:
    """Seconds of a step's parts: forward and backward of one micro-step; gradients out, Adam and weights back of all chunks."""

    forward: float
    backward: float
    out: float
    adam: float
    back: float
    chunks: int
    micro_steps: int = 1

    @property
    def earlier(self) -> float:
        """The micro-steps before the last backward, but for the first forward."""
        return (self.micro_steps - 1) * (max(self.backward, self.out) + self.forward)


def streamed(parts: Parts, weights: float) -> Parts:
    """Return the parts of a step whose weights lie in host memory and come anew for each pass, in `weights` seconds.

    The step brings none back then: Adam writes them where they lie.
    """
    return replace(parts, forward=max(parts.forward, weights), backward=max(parts.backward, weights), back=0.0)


def lazy_bound(parts: Parts) -> float:
    """The least that a step takes whose Adam and weights back hide behind the next step's first forward.

    Chunk after chunk goes through Adam, back and forward, of which the slowest never waits once it has begun; and the last
    gradient goes through them when it has arrived.
    """
    chunks = parts.chunks
    through = (parts.adam + parts.back + parts.forward) / chunks
    updated = parts.backward + max(parts.adam, parts.back, parts.forward) * (chunks - 1) / chunks + through
    arrived = max(parts.out + parts.backward / chunks, parts.backward + parts.out / chunks)
    return parts.earlier + max(updated, arrived + through)


def deepspeed_time(parts: Parts) -> float:
    """What ZeRO-Offload's schedule takes: gradients out beside backward, then all of Adam, then all weights back."""
    return parts.earlier + parts.forward + max(parts.backward, parts.out) + parts.out / parts.chunks + parts.adam + parts.back
