"""Which texts are taken for secrets and personal data, which are not, and that no text takes longer than its length allows."""

import string

import pytest
from tests.growth import TIMES, grows_with_its_input

from ostinato.serve.secret_detector import KINDS, SecretDetector, is_named_secret

MIXED = "a1B2c3D4e5F6g7H8i9J0kLmNoPqRsTuVwXyZ"
FOUND = [
    ("AWS_KEY_ID", "AKIAIOSFODNN7EXAMPL2"),
    ("AWS_SECRET", 'aws_secret_access_key = "[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]"'),
    ("GITHUB_TOKEN", "ghp_" + MIXED),
    ("GITHUB_TOKEN", "github_pat_11ABCDEFG0" + MIXED + MIXED[:30]),
    ("GITLAB_TOKEN", "glpat-" + MIXED[:20]),
    ("SLACK_TOKEN", "xoxb-123456789012-123456789012-" + MIXED[:24]),
    ("SLACK_WEBHOOK", "https://[hooks.slack.com/services/T0A1B2C3D/B0A1B2C3D/" + MIXED[:24] + "]"),
    ("STRIPE_KEY", "sk_live_" + MIXED[:24]),
    ("ANTHROPIC_KEY", "sk-ant-api03-" + MIXED + "-_" + MIXED),
    ("OPENAI_KEY", "sk-proj-" + MIXED + "T3BlbkFJ" + MIXED),
    ("GOOGLE_KEY", "AIzaSy" + MIXED[:33]),
    ("JWT", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"),
    ("PRIVATE_KEY", "-----BEGIN EC PRIVATE KEY-----\n" + (MIXED + "\n") * 3 + "-----END EC PRIVATE KEY-----"),
    ("PRIVATE_KEY", "-----BEGIN PRIVATE KEY-----\\n" + (MIXED + "\\n") * 3 + "-----END PRIVATE KEY-----"),
    ("PRIVATE_KEY", "-----BEGIN PRIVATE KEY-----\n" + "\n".join([MIXED] * 3)),  # cut off
    ("NPM_TOKEN", "npm_" + MIXED),
    ("PYPI_TOKEN", "pypi-AgEIcHlwaS5vcmc" + MIXED * 2),
    ("HF_TOKEN", "hf_" + string.ascii_letters[:34]),
    ("SENDGRID_KEY", "SG." + MIXED[:22] + "." + MIXED + "1234567"),
    ("TWILIO_KEY", "SK0123456789abcdef0123456789abcdef"),
    ("MAILCHIMP_KEY", "0123456789abcdef0123456789abcdef-us12"),
    ("DISCORD_TOKEN", "MTAxMjM0NTY3ODkwMTIzNDU2.GaBcDe." + MIXED[:30]),
    ("TELEGRAM_TOKEN", "110201543:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw0"),
    ("API_KEY", "dop_v1_" + "0123456789abcdef" * 4),
    ("API_KEY", "hvs." + MIXED),
    ("AZURE_KEY", "AccountName=x;AccountKey=[" + MIXED * 2 + "==];EndpointSuffix=core.windows.net"),
    ("URL_PASSWORD", "postgres://admin:[s3cr3t:Pw]@db.example.com:5432/app"),
    ("URL_PASSWORD", "redis://:[hunter2]@localhost:6379/0"),
    ("AUTHORIZATION", "Authorization: Bearer [" + MIXED + "]"),
    ("AUTHORIZATION", "curl -H 'Authorization: Basic [YWxhZGRpbjpvcGVuc2VzYW1l]'"),
    ("PASSWORD", 'password = "[Hunter2xyz]"'),
    ("PASSWORD", "'db_password': '[correct/horse9Battery]'"),
    ("PASSWORD", "export API_TOKEN=[Zx81spectrumQ]"),
    ("PASSWORD", 'SECRET_KEY = "[0123456789abcdef0123456789abcdef]"'),
    ("PASSWORD", 'password: "[Zx81Spectrum]"'),
    ("PASSWORD", 'password = "[EeKmqMAnhBKPoD]"'),
    ("PASSWORD", "my password is [Hunter2xyz]."),
    ("PASSWORD", '{\\"password\\": \\"[Hunter2xyz]\\"}'),
    ("SERVICE_KEY", "DATADOG_SITE_ID = '[a1b2c3d4e5f60718293a4b5c6d7e8f90]'"),
    ("EMAIL", "<[ann.lee+x@mail.example.co.uk]>,"),
    ("PHONE", "[+49 30 1234567], "),
    ("PHONE", "[(415) 555-1234]"),
    ("PHONE", "[415-555-1234]"),
    ("PHONE", "Tel.: [030 / 1234567]"),
    ("CARD", "[4111 1111 1111 1111] 737"),
    ("CARD", "[378282246310005]"),
    ("IBAN", "[DE89 3704 0044 0532 0130 00] PLEASE"),
    ("IBAN", "[GB82WEST12345698765432]"),
    ("NATIONAL_ID", "[123-45-6789]"),  # United States
    ("NATIONAL_ID", "[12345678Z]"),  # Spain
    ("NATIONAL_ID", "[RSSMRA85T10A562S]"),  # Italy
    ("NATIONAL_ID", "[2 69 05 49 588 157 80]"),  # France
    ("NATIONAL_ID", "[529.982.247-25]"),  # Brazil
    ("NATIONAL_ID", "[811228-9874]"),  # Sweden
    ("NATIONAL_ID", "[44051401458]"),  # Poland
    ("NATIONAL_ID", "[11010519491231002X]"),  # China
    ("NATIONAL_ID", "[AB 12 34 56 C]"),  # United Kingdom
    ("IP", "[93.184.216.34]:80"),
    ("IP", "[2001:db8:85a3::8a2e:370:7334]"),
]  # fmt: skip
CLEAN = [
    "Version 3.11.7 of 2026-11-21 at 14:30:59, total 1,482.50, sum 12345678901234567890.",
    'sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"',
    'commit 9f8b2c1d4e5f60718293a4b5c6d7e8f901234567, uuid "123e4567-e89b-12d3-a456-426614174000"',
    "see https://example.com:8080/docs/v2.0.1?x=1&y=2#z and git@github.com:a/b.git, logo@2x.png",
    "0.4111111111111111 and 3.14159265358979 and 1700000000000 and 4111 1111 1111 1112",
    'token = tokens[i]; password = getpass(); api_key = os.environ["API_KEY"]; secret = self.secret_of(user)',
    'password = "CorrectHorseBattery"; api_key = "SOMEHTTPServerName"',
    'password = "password"; token="YOUR_TOKEN_HERE1"; api_key = "<your-key-1>"; secret: "${SECRET_1}"; pad_token = "[PAD1]"',
    "ghp_" + "x" * 36 + " sk-" + "x" * 40 + " AKIA" + "X" * 16,
    "starts with -----BEGIN PRIVATE KEY----- as every PEM file does",
    "999-45-6789 12345678A 529.982.247-26 811328-9874 44051401459 DE88370400440532013000",
    "postgres://user:${PASSWORD}@host and https://user:<password>@host",
    "127.0.0.1 0.0.0.0 ::1 300.1.2.3 1.2.3",
    "⟨EMAIL_3f2a91c4⟩ ⟨PASSWORD_0123456789abcdef⟩ password = \"⟨PASSWORD_3f2a91c4⟩\"",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), FOUND)
@pytest.mark.parametrize("frame", ["{}", "Ann says: {} now", '    x = f("{}")  # é\n'])
def test_each_kind_is_found_and_nothing_beside_it(kind, text, frame):
    plain, marked = text.replace("[", "").replace("]", ""), text if "[" in text else f"[{text}]"
    value = marked[marked.index("[") + 1 : marked.index("]")]
    data = frame.format(plain).encode()
    assert [(each.kind, data[each.start : each.end].decode()) for each in SecretDetector().find(data)] == [
        (kind, value)
    ]


def test_all_kinds_are_tried():
    assert {kind for kind, _ in FOUND} | {"DISCORD_WEBHOOK"} == set(KINDS)
    assert len(KINDS) >= 32


@pytest.mark.parametrize("text", CLEAN)
def test_what_only_looks_alike_is_left(text):
    assert not SecretDetector().find(text.encode())


HOSTILE = [
    "a", "a.", "1 ", "1", "4111 ", "A",
    "@", "a@a.", "a@a.png ", "password", "password=", 'password="',
    "{", '"\\', '\\"', "hvs.a.", "sk-", "sk-a",
    "password-AKIAIOSFODNN7EXAMPL2-", "eyJaaaaaaaaaa", "eyJaaaaaaaaaa-AKIAIOSFODNN7EXAMPL2-", "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----AAAAAAAAAAAAAAAAAAAAAAA ", "://a:",
    "a://b:c", "://a:b@", "+1 ", "+1", "(415) ", "⟨",
    "⟨A_", "⟨EMAIL_3f2a91c4⟩", "DE89", "DE89 3704 ", "1.", "a:",
    "::1:", "Authorization: Basic ", "basic aaaaaaaaaaaaaaaaaaaa ", "phone: 1 ", "xoxb-aaaaaaaaaa", '\U0001f600',
]  # fmt: skip


@pytest.mark.parametrize("letters", ["aA", "Aa"])
def test_no_word_takes_longer_than_its_length_allows(letters):
    """Letters alone, of which the last does not fit, can be cut into words in ever more ways."""

    def assigned(length):
        return f'password = "{letters[0] * length}{letters[1]}"'.encode()

    assert grows_with_its_input(SecretDetector().find, assigned(4), assigned(36))
    assert SecretDetector().find(assigned(280)) == []
    assert not is_named_secret("password", letters[0] * 100_000 + letters[1])


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_text_takes_longer_than_its_length_allows(piece):
    data = piece.encode(errors="surrogatepass")
    small = data * (2_000 // len(data))
    assert grows_with_its_input(SecretDetector().find, small, small * TIMES)
