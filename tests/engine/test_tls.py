"""Encrypted channels to real processes, with certificates made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from pools import generate
from rollout.config import ChannelConfig, InProcessPlacement, RolloutConfig, SimulatedEngine
from rollout.engine.channel.sockets import TlsFiles
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.errors import ConfigError, EngineError

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def anyio_backend() -> str:
    """Real time."""
    return "trio"


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """A certificate of an authority that the driver trusts."""
    authority = trustme.CA()
    certificate = authority.issue_cert("engine.test")
    paths = [str(tmp_path / name) for name in ("certificate.pem", "key.pem", "authority.pem")]
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return TlsFiles(*paths)


def pool_with(files: TlsFiles | None) -> EnginePool:
    return EnginePool(
        placement=LocalProcess(),
        specs=[CoreSpec("fake_core:CountingCore", {}, tls=files)],
        router=Router(),
        start_timeout_s=60,
    )


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_tls_tokens_arrive_over_an_encrypted_channel(files: TlsFiles) -> None:
    async with pool_with(files).serving() as pool:
        assert list((await generate(pool, [5], 200)).ids) == list(range(6, 206))


async def test_tls_engine_of_another_authority_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    other = TlsFiles(files.certificate, files.key, str(tmp_path / "other.pem"))
    with pytest.raises(EngineError, match="certificate verify failed"):
        async with pool_with(other).serving():
            pytest.fail("opened")


async def test_tls_engine_without_its_key_says_which_file(files: TlsFiles) -> None:
    missing = TlsFiles(files.certificate, "/nowhere/key.pem", files.authority)
    with pytest.raises(EngineError) as caught:
        async with pool_with(missing).serving():
            pytest.fail("opened")
    assert str(caught.value) == (
        f"engine-0: channel.tls_certificate = {files.certificate!r} with channel.tls_key = "
        "'/nowhere/key.pem': cannot be used: [Errno 2] No such file or directory"
    )


def test_tls_one_file_alone_is_a_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        ChannelConfig(tls_certificate="c.pem", tls_key="k.pem")
    assert "channel.tls_authority: missing; expected a path beside channel.tls_certificate" in str(
        caught.value
    )


def test_tls_of_engines_in_process_is_a_fault() -> None:
    channel = ChannelConfig(tls_certificate="c.pem", tls_key="k.pem", tls_authority="a.pem")
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(engine=SimulatedEngine(), placement=InProcessPlacement(), channel=channel)
    assert (
        "channel.tls_certificate = 'c.pem': expected None with placement.kind = 'in_process': "
        "nothing leaves the process"
    ) in str(caught.value)
