"""Which operators can be cut, where, and what takes their place: the one table of the paper's forms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import cast

import torch
from torch import nn

from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.experts import Experts
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.subnetworks import as_chain
from crystallite.serving.cuts.experts import CutExperts, expert_site
from crystallite.serving.cuts.feature_sites import chain_run, chain_sites, conv_site, feed_forward_sites
from crystallite.serving.cuts.features import CutFeatures, Ends
from crystallite.serving.cuts.recurrent import CutRecurrent, recurrent_sites
from crystallite.serving.cuts.site import FeatureSite, Groups, Named, Site

__all__ = ["CUTTABLE", "forms", "fuse_uncut", "site_of", "without_blocks"]

CUTTABLE = (BlockLinear, BlockChain, BlockFeedForward, BlockConv, BlockRecurrent, Experts)
_RUN = re.compile(r"layers\.(\d+)-(\d+)")


def forms(operator: nn.Module) -> list[list[Site]]:
    """The ways to cut an operator, the best first: in each, the sites that run one after the other.

    >>> _ = torch.manual_seed(0)
    >>> from crystallite import decompose
    >>> weight = torch.block_diag(torch.ones(2, 3), torch.ones(1, 2))
    >>> ((site,),) = forms(BlockLinear.from_dense(weight, None, decompose(weight)))
    >>> [cost.macs for cost in site.costs], site.part([1])
    ([6, 2], BlockLinear(in_features=2, out_features=1, bias=False, blocks=1, 2 of 2 multiply-adds))
    """
    if isinstance(operator, (BlockLinear, BlockChain)):
        return cast(list[list[Site]], chain_sites(as_chain(operator)))
    if isinstance(operator, BlockFeedForward):
        return [[*feed_forward_sites(operator)]]
    if isinstance(operator, BlockConv):
        return [[conv_site(operator)]]
    if isinstance(operator, BlockRecurrent):
        return [[*recurrent_sites(operator)]]
    assert isinstance(operator, Experts)
    return [[expert_site(operator)]]


def site_of(operator: nn.Module, name: str) -> Site:
    """The site of that name."""
    run = _RUN.fullmatch(name)
    if run and isinstance(operator, BlockChain):
        return chain_run(operator, int(run[1]), int(run[2]) + 1)
    return next(site for sites in forms(operator) for site in sites if site.name == name)


def fuse_uncut(operator: nn.Module, sites: Sequence[Site], groups: Sequence[Groups]) -> list[tuple[Site, Groups]]:
    """Sites with the groups of their blocks; consecutive layers of a chain that are one group each are one site."""
    found: list[tuple[Site, Groups]] = []
    numbered = list(enumerate(zip(sites, groups, strict=True)))
    for whole, run in groupby(numbered, key=lambda each: len(each[1][1]) == 1):
        members = list(run)
        if whole and len(members) > 1 and isinstance(operator, BlockChain):
            found.append((chain_run(operator, members[0][0], members[-1][0] + 1), [[0]]))
        else:
            found += [pair for _, pair in members]
    return found


def without_blocks(operator: nn.Module, pieces: Mapping[str, Named]) -> nn.Module:
    """What takes the place of an operator whose blocks are pieces: by the name of a site, its pieces."""
    if isinstance(operator, BlockRecurrent):
        return CutRecurrent(operator, list(pieces.values())).eval()
    if isinstance(operator, Experts):
        return CutExperts(operator, *pieces.values()).eval()
    sites = [(cast(FeatureSite, site_of(operator, name)), named) for name, named in pieces.items()]
    return CutFeatures(sites, _ends(operator, sites[0][0])).eval()


def _ends(operator: nn.Module, first: FeatureSite) -> Ends:
    if isinstance(operator, (BlockLinear, BlockChain)):
        chain = as_chain(operator)
        apart = first.name == "" and len(chain.layers) > 1  # subnetworks write outputs in the model's order
        return Ends(chain.in_features, None if apart else chain.outputs)
    if isinstance(operator, BlockFeedForward):
        return Ends(operator.in_features, operator.outputs, operator.n_channels, operator.bias)
    assert isinstance(operator, BlockConv)
    outputs = operator.outputs
    if outputs is not None:
        outputs = torch.argsort(torch.argsort(outputs, stable=True))  # dormant ones count on
    return Ends(operator.in_channels, outputs, axes=len(operator.kernel_size))
