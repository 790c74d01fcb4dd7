"""`crystallite serve` in the table of commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crystallite.cli.options import Command, Option
from crystallite.cli.shared_options import JSON, ORIGINAL, RULES, SHAPE

__all__ = ["SERVE"]

_LISTENING = (
    Option("host", "address to listen on; any but this machine's own needs --token-file", default="127.0.0.1"),
    Option("port", "port to listen on; 0 for a free one", int, 8000),
    Option("grpc_port", "port to answer gRPC on as well; 0 for a free one", int),
    Option("tls_cert", "certificate and its chain, PEM, for both protocols", Path, metavar="FILE", own=True,
           needs="--tls-key"),
    Option("tls_key", "private key of the certificate, PEM", Path, metavar="FILE", own=True, needs="--tls-cert"),
    Option("log", "print a line for every request on standard error", choices=("json",), own=True),
    Option("token_file", "file with the token that requests must carry", Path, metavar="FILE", own=True,
           must_be="there"),
    Option("max_batch", "samples that are computed together", int, 64, metavar="N"),
    Option("max_wait", "seconds to wait for a fuller batch", float, 0.0, metavar="SECONDS"),
    Option("max_queue", "requests that may wait", int, 256, metavar="N"),
    Option("timeout", "seconds that a request may take", float, 30.0, metavar="SECONDS"),
    Option("max_bytes", "bytes that a request may have", int, 64 << 20, metavar="N"),
    Option("max_connections", "connections that may be open, of each protocol", int, 512, metavar="N"),
    Option("header_timeout", "seconds until a connection must have sent a request's headers", float, 10.0,
           metavar="SECONDS"),
    Option("idle_timeout", "seconds that a connection may stay open without a request", float, 60.0,
           metavar="SECONDS"),
    Option("allow_hosts", "further name of this machine that requests without a token may be sent to", metavar="HOST",
           default=(), takes="repeated", flag="--allow-host"),
    Option("unvalidated", "serve without a verdict that the model passed", takes="nothing", default=False),
    Option("trial", "original to run beside the model on the same requests: it answers, both are compared",
           metavar="MODEL", own=True),
    Option("requests", "requests of a trial after which a verdict is given", int, 1000, metavar="N",
           flag="--trial-requests", needs="--trial"),
    Option("attach", "write the verdict of a trial into the saved model", takes="nothing", default=False,
           flag="--attach-verdict", needs="--trial"),
    *(replace(rule, needs="--trial") for rule in RULES if rule.name in ("min_agreement", "quantile", "confidence")),
    Option("max_relative_deviation", "largest relative deviation of an output that a trial accepts", float, 0.1,
           metavar="DEVIATION", needs="--trial"),
    SHAPE,
    Option("outputs", "outputs that are answered (default: all but caches and what layers saw)", metavar="NAME",
           takes="many", default=()),
    Option("engine", "where to run: this process, or a Ray cluster", default="local", choices=("local", "ray")),
)  # fmt: skip
SERVE = Command(
    "serve",
    "serve saved models over the network",
    "Serve saved models: one tier collects requests and deals them out, the other computes.",
    (
        Option("models", "folder that crystallite or transformers wrote, with a name of its own if given",
               metavar="[NAME=]FOLDER", takes="arguments", own=True),
        Option("plan", "print which pieces would be services, and end", takes="nothing", own=True, default=False,
               excludes=tuple(option.word for option in _LISTENING)),
        replace(JSON, help="print the plan as JSON", needs="--plan"),
        Option("batch", "samples of a request to plan for", int, 1, metavar="N"),
        ORIGINAL,
        *_LISTENING,
    ),
    "crystallite.cli.serve:run",
    ("crystallite.serving.service:Service.load", "crystallite.serving.limits:Limits",
     "crystallite.serving.listening:Listener", "crystallite.serving.live_trial:TrialOptions",
     "crystallite.validation.rules:Rules"),
    example="""\
  crystallite serve small --plan
  crystallite serve small --port 8000 --grpc-port 8001
  crystallite serve fraud=models/fraud prices=models/prices --host 10.0.0.5 --token-file token \\
    --tls-cert server.pem --tls-key server.key --log json
  crystallite serve small --trial my_package.models:build --trial-requests 5000 --attach-verdict

Clients of the Open Inference Protocol v2 work unchanged, such as tritonclient. SIGTERM answers what was accepted and
ends; SIGHUP, or POST /v2/repository/models/NAME/load, opens the folders again (point a link at the new version) and
keeps the old version where the new one may not be served. Metrics for Prometheus: /metrics.
""",
)  # fmt: skip
