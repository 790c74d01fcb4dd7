"""`Caller`: what the headers of a request say, checked by one policy for HTTP and gRPC."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from crystallite.core.errors import InvalidOption
from crystallite.serving.limits import MOST_HEADER_BYTES, MOST_HEADERS
from crystallite.serving.refusal import Refusal

__all__ = ["Caller", "Trace", "check_hosts", "identifier", "is_loopback"]

_ONCE = ("authorization", "host", "origin", "traceparent", "x-request-id")
_IDENTIFIER = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class Trace:
    """The place of a request in the caller's trace (W3C Trace Context).

    >>> Trace.of(f"00-{'a' * 32}-{'b' * 16}-01").is_sampled
    True
    >>> Trace.of("00-nothing-of-this-01")
    """

    trace_id: str
    span_id: str
    flags: str

    @classmethod
    def of(cls, traceparent: str | None) -> Trace | None:
        """What a `traceparent` says; None if it is not valid, and counts as not sent."""
        found = _TRACE.fullmatch(traceparent or "")
        if found is None or (found[1] == "00" and found[5]):  # only later versions may have more fields
            return None
        return cls(found[2], found[3], found[4])

    @property
    def is_sampled(self) -> bool:
        return bool(int(self.flags, 16) & 1)


@dataclass(frozen=True)
class Caller:
    """The headers, or gRPC metadata, that a service reads."""

    request_id: str | None = None
    trace: Trace | None = None
    authorization: str | None = None
    host: str | None = None
    origin: str | None = None

    @classmethod
    def of(cls, headers: Iterable[tuple[str, str | bytes]], target: str = "") -> Caller:
        """What headers say; a `Refusal` if they, with the request's target, are too large or contradict each other.

        A request id that does not fit into a header, and a trace that is none, count as not sent.

        >>> Caller.of([("X-Request-Id", "7"), ("X-Request-Id", "8")])
        Traceback (most recent call last):
        crystallite.serving.refusal.Refusal: x-request-id: expected it once, got it several times
        """
        size, number = len(target), 0
        found: dict[str, str] = {}
        for name, value in headers:
            size, number, name = size + len(name) + len(value), number + 1, name.lower()
            if name in _ONCE and isinstance(value, str):
                if name in found:
                    raise Refusal(400, f"{name}: expected it once, got it several times")
                found[name] = value
        if size > MOST_HEADER_BYTES:
            raise Refusal(431, f"expected at most {MOST_HEADER_BYTES} bytes of headers, got {size}")
        if number > MOST_HEADERS:
            raise Refusal(431, f"expected at most {MOST_HEADERS} headers, got {number}")
        said = identifier(found.get("x-request-id")), Trace.of(found.get("traceparent"))
        return cls(*said, *(found.get(name) for name in ("authorization", "host", "origin")))

    def check_host(self, allowed: frozenset[str]) -> None:
        """Refuse a request that was meant for somebody else, or that a foreign page sent.

        A browser sends what any page asks for. The page of another site says so in `Origin`; one whose name was made to
        point at this machine says so in `Host`.
        """
        if self.host is not None and not _is_among(_host(self.host), allowed):
            raise Refusal(
                403, f"Host: expected this machine (localhost, 127.0.0.1, [::1]), got {self.host!r:.80}; "
                "--allow-host names others"
            )  # fmt: skip
        if self.origin is not None and not self._is_own(allowed):
            raise Refusal(
                403, f"Origin: expected a page of this service, got {self.origin!r:.80}; --allow-host names others"
            )

    def _is_own(self, allowed: frozenset[str]) -> bool:
        try:
            page = urlsplit(self.origin or "")
            name = page.hostname
        except ValueError:
            return False
        own = self.host is not None and page.netloc.lower() == self.host.lower()
        return page.scheme in ("http", "https") and (own or name in allowed)


def identifier(name: str | None) -> str | None:
    """The name that a caller gave a request, if it fits into a header.

    >>> identifier("seven"), identifier("two words")
    ('seven', None)
    """
    return name if name is not None and _IDENTIFIER.fullmatch(name) else None


def check_hosts(names: Iterable[str]) -> frozenset[str]:
    """Names of hosts as they are compared; an `InvalidOption` for what is none.

    >>> sorted(check_hosts(["API.example.org"]))
    ['api.example.org']
    """
    hosts = frozenset(name.lower() for name in names)
    for name in hosts:
        if not re.fullmatch(r"[a-z0-9.:_-]{1,253}", name) or (":" in name and not _is_address(name)):
            raise InvalidOption(f"allow_hosts: expected names of hosts without scheme and port, got {name!r:.80}")
    return hosts


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach that address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host(header: str) -> str | None:
    """The name in a `Host` header, without its port."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:@/?#\s]+))(?::\d{0,5})?", header.strip())
    return found and (found[1] or found[2]).lower()


def _is_among(host: str | None, allowed: frozenset[str]) -> bool:
    return host is not None and (is_loopback(host) or host.removesuffix(".") in allowed)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
