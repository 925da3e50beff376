#!/usr/bin/env python3
"""Check the evidence in this directory. Needs Python 3 and openssl, and nothing of Tagout.

usage: python3 verify.py [DIRECTORY]

It checks that every file is the one the manifest names and that there is no other, that the manifest's signature is
that of keys/manifest.pem, that each log's checkpoint is signed with the key of its daemon, and that every record is in
the tree that the checkpoint signs (RFC 6962). Whether the keys are the right ones only you can tell: compare them with
those that you were given by another way.
"""
import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile

problems = []


def wrong(text):
    problems.append(text)
    print("WRONG:", text)


def sha256(data):
    return hashlib.sha256(data).digest()


def read(name):
    with open(os.path.join(root, name), "rb") as f:
        return f.read()


def signed(pem, message, signature):
    with tempfile.TemporaryDirectory() as tmp:
        paths = [os.path.join(tmp, n) for n in ("message", "signature")]
        for path, data in zip(paths, (message, signature)):
            with open(path, "wb") as f:
                f.write(data)
        return subprocess.run(
            ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", os.path.join(root, pem), "-rawin", "-in", paths[0], "-sigfile", paths[1]],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def check_manifest():
    names = set()
    for line in read("manifest.sha256").decode().splitlines():
        want, name = line.split("  ", 1)
        names.add(name)
        try:
            if sha256(read(name)).hex() != want:
                wrong(name + " is not the file that the manifest names")
        except OSError as e:
            wrong("%s: %s" % (name, e.strerror))
    for folder, _, files in os.walk(root):
        for f in files:
            name = os.path.relpath(os.path.join(folder, f), root)
            if name not in names and name not in ("manifest.sha256", "manifest.sha256.sig"):
                wrong(name + " is not in the manifest")
    if not signed("keys/manifest.pem", read("manifest.sha256"), read("manifest.sha256.sig")):
        wrong("the manifest is not signed with keys/manifest.pem")
    return names


def root_from(index, size, leaf, proof):
    """RFC 6962, 2.1.1: the tree's hash, from a leaf and the hashes beside its way up."""
    fn, sn, h = index, size - 1, leaf
    for p in proof:
        if sn == 0:
            return None
        if fn & 1 or fn == sn:
            h = sha256(b"\x01" + p + h)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            h = sha256(b"\x01" + h + p)
        fn, sn = fn >> 1, sn >> 1
    return h if sn == 0 else None


def check_log(daemon):
    note = read("proofs/%s.checkpoint" % daemon).decode()
    text, _, signatures = note.partition("\n\n")
    text += "\n"
    name, size, tree = text.split("\n")[:3]
    key_name, key_hash = read("keys/%s.pub" % daemon).decode().split("+")[:2]
    good = False
    for m in re.finditer("^— (\\S+) (\\S+)$", signatures, re.M):
        raw = base64.b64decode(m.group(2))
        if m.group(1) == key_name == name and raw[:4].hex() == key_hash:
            good = good or signed("keys/%s.pem" % daemon, text.encode(), raw[4:])
    if not good:
        wrong("the checkpoint of %s is not signed with keys/%s.pem" % (daemon, daemon))
    records = read("records/%s.jsonl" % daemon).split(b"\n")[:-1]
    proofs = read("proofs/%s.proofs" % daemon).decode().splitlines()
    if len(records) != len(proofs):
        wrong("%s has %d records and %d proofs" % (daemon, len(records), len(proofs)))
    for record, proof in zip(records, proofs):
        index, *hashes = proof.split(" ")
        got = root_from(int(index), int(size), sha256(b"\x00" + record), [base64.b64decode(h) for h in hashes])
        if got != base64.b64decode(tree) or int(index) >= int(size):
            wrong("record %s of %s is not the one that was signed" % (index, daemon))
    print("%s: %d records, in the tree of %s that covers %s" % (daemon, len(records), name, size))
    return records


def main():
    names = check_manifest()
    records = []
    for name in sorted(names):
        m = re.fullmatch(r"records/([^/]+)\.jsonl", name)
        if m and "proofs/%s.checkpoint" % m.group(1) in names:
            records += check_log(m.group(1))
        elif m:
            wrong("the records of %s have no proof" % m.group(1))
    if "timeline.jsonl" in names and sorted(read("timeline.jsonl").split(b"\n")[:-1]) != sorted(records):
        wrong("the timeline has other records than those that are proven")
    print("%d problems" % len(problems) if problems else "all is as it was signed")
    return 1 if problems else 0


root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
sys.exit(main())
