"""Run keys: whoever is not the site that signed is refused; bytes have one reading."""

import datetime
import os
import pathlib
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.network import keys, primitives
from fedbnr_jax.network.framing import digest, frame
from fedbnr_jax.network.identity import PrivateIdentity, PublicIdentity
from tests.masked_sites import RUN, Sites

_PRIVATE = {
  "ed25519": ed25519.Ed25519PrivateKey.generate,
  "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
  "rsa": lambda: rsa.generate_private_key(65537, 2048),
}
_parts = st.lists(
  st.text(max_size=3) | st.binary(max_size=3) | st.integers(), max_size=4
)


def _pem(private):
  return private.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
  )


def _certificate(private):
  """A certificate that a key has signed for itself."""
  name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "site")])
  now = datetime.datetime(2026, 1, 1)
  algorithm = (
    None if isinstance(private, ed25519.Ed25519PrivateKey) else hashes.SHA256()
  )
  return (
    x509.CertificateBuilder()
    .subject_name(name)
    .issuer_name(name)
    .public_key(private.public_key())
    .serial_number(1)
    .not_valid_before(now)
    .not_valid_after(now + datetime.timedelta(days=9))
    .sign(private, algorithm)
    .public_bytes(serialization.Encoding.PEM)
  )


@hypothesis.given(_parts, _parts)
@hypothesis.example(["ab", "c"], ["a", "bc"])
@hypothesis.example(["1"], [1])
@hypothesis.example(["a"], [b"a"])
@hypothesis.example([], [""])
@hypothesis.settings(max_examples=300)
def test_different_parts_are_different_bytes(left, right):
  same = list(map(type, left)) == list(map(type, right)) and left == right
  assert (frame(*left) == frame(*right)) == same
  assert (digest(*left) == digest(*right)) == same


@pytest.mark.parametrize("kind", _PRIVATE)
def test_an_identity_verifies_what_it_signed_and_nothing_else(kind):
  private = _PRIVATE[kind]()
  identity = PrivateIdentity.from_pem(_pem(private))
  others = [
    PublicIdentity.from_pem(identity.public.pem()),
    PublicIdentity.from_pem(_certificate(private)),
  ]
  signature = identity.sign(b"key")
  stranger = PrivateIdentity(_PRIVATE[kind]())
  for other in others:
    assert other.fingerprint() == identity.public.fingerprint()
    assert other.verify(b"key", signature)
    assert not other.verify(b"kez", signature)
    assert not other.verify(b"key", stranger.sign(b"key"))
    assert not other.verify(b"key", signature[:-1])
    assert not other.verify(b"key", b"")
  assert stranger.public.fingerprint() != identity.public.fingerprint()


def test_keys_that_cannot_sign_are_no_identities():
  private = x25519.X25519PrivateKey.generate()
  public = private.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
  )
  with pytest.raises(InputError, match="cannot be a key of type"):
    PrivateIdentity.from_pem(_pem(private))
  with pytest.raises(InputError, match="cannot be a key of type"):
    PublicIdentity.from_pem(public)
  with pytest.raises(InputError, match="no readable private key"):
    PrivateIdentity.from_pem(public)
  for text in (b"", b"-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\n"):
    with pytest.raises(InputError, match="no readable public key or certificate"):
      PublicIdentity.from_pem(text)


def test_cards_of_all_sites_are_accepted(tmp_path):
  sites = Sites(tmp_path)
  assert dict(sites.keys.public) == {card.site: card.public for card in sites.cards}


def test_a_key_that_its_site_did_not_sign_is_refused(tmp_path):
  """A server in the middle has keys and an identity of its own, but no site's."""
  sites = Sites(tmp_path)
  own = primitives.public_key(primitives.new_private_key())
  card = sites.cards[1]
  server = PrivateIdentity.new()
  forged = [
    card._replace(public=own),  # Its own key under a site's signature.
    keys.signed_card(server, RUN, "b", own),
    card._replace(signature=sites.cards[2].signature),
    card._replace(signature=b""),
    keys.signed_card(sites.identities["b"], "another run", "b", card.public),
    keys.signed_card(sites.identities["b"], RUN, "c", card.public)._replace(site="b"),
  ]
  for forgery in forged:
    with pytest.raises(InputError, match="'b' is not signed by that site for this run"):
      keys.verified([sites.cards[0], forgery, *sites.cards[2:]], RUN, sites.known)


def test_strangers_doubles_and_shared_keys_are_refused(tmp_path):
  sites = Sites(tmp_path)
  first = sites.cards[0]
  stranger = keys.signed_card(PrivateIdentity.new(), RUN, "e", first.public)
  with pytest.raises(InputError, match="'e', whose identity is not known"):
    keys.verified([*sites.cards, stranger], RUN, sites.known)
  with pytest.raises(InputError, match="two run keys came for site 'a'"):
    keys.verified([*sites.cards, first], RUN, sites.known)
  shared = keys.signed_card(sites.identities["b"], RUN, "b", first.public)
  with pytest.raises(InputError, match="not 32 bytes of its own"):
    keys.verified([first, shared], RUN, sites.known)
  short = keys.signed_card(sites.identities["b"], RUN, "b", b"key")
  with pytest.raises(InputError, match="not 32 bytes of its own"):
    keys.verified([first, short], RUN, sites.known)


def test_a_key_that_makes_every_secret_zero_is_refused():
  with pytest.raises(InputError, match="no secret can be agreed on"):
    primitives.agreed_secret(primitives.new_private_key(), bytes(32))


def test_both_of_a_pair_come_to_the_same_secret_and_others_do_not():
  a, b, c = (primitives.new_private_key() for _ in range(3))
  secret = primitives.agreed_secret(a, primitives.public_key(b))
  assert secret == primitives.agreed_secret(b, primitives.public_key(a))
  assert secret != primitives.agreed_secret(c, primitives.public_key(b))
  assert primitives.derived_key(secret, b"1") == primitives.derived_key(secret, b"1")
  assert primitives.derived_key(secret, b"1") != primitives.derived_key(secret, b"2")


def test_the_stream_is_the_published_one():
  """ChaCha20 with a zero key, nonce and counter: RFC 8439, appendix A.1, vector 1."""
  expected = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
  )
  total = np.zeros((4, 2), np.uint64)
  primitives.add_stream(total, bytes(32), 1)
  assert total.astype("<u8").tobytes() == expected


@pytest.mark.parametrize("size", [0, 1, (1 << 14) - 1, 1 << 14, (1 << 14) + 5, 40_000])
def test_a_stream_does_not_depend_on_how_it_is_cut(size):
  whole = np.zeros((40_000, 2), np.uint64)
  primitives.add_stream(whole, b"k" * 32, 1)
  part = np.zeros((size, 2), np.uint64)
  primitives.add_stream(part, b"k" * 32, 1)
  np.testing.assert_array_equal(part, whole[:size])
  primitives.add_stream(part, b"k" * 32, -1)
  assert not part.any()


def test_without_the_extra_all_can_be_imported_and_use_says_what_to_install():
  root = pathlib.Path(__file__).resolve().parents[1]
  program = """
import sys
sys.modules["cryptography"] = None
import fedbnr_jax
from fedbnr_jax.network import identity, keys, masked_site, masked_sum, primitives
for use in (primitives.new_private_key, identity.PrivateIdentity.new):
  try:
    use()
  except fedbnr_jax.InputError as error:
    assert "pip install 'fedbnr-jax[network]'" in str(error), error
  else:
    raise AssertionError(use)
"""
  environment = os.environ | {"PYTHONPATH": str(root)}
  subprocess.run([sys.executable, "-c", program], check=True, env=environment)
