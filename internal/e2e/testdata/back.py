"""Asks one guard over and over from inside a kid: python3 back.py proxy|dns TARGET SECONDS.

The file "served" appears with the first answer. Once there is a file "killing" it waits until the guard fails, and until it serves again or the
seconds are over; what is printed are moments of the boot clock in nanoseconds, 0 where it did not come to that."""
import json, os, socket, sys, time

PATIENCE = 0.1  # seconds for one try: shorter than what is measured

kind, target, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])


def now():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def proxy():
    with socket.create_connection((target, 80), PATIENCE) as s:
        s.sendall(b"GET /hello.txt HTTP/1.1\r\nHost: files.vendor.test\r\nConnection: close\r\n\r\n")
        return s.recv(64).startswith(b"HTTP/1.1 200 ")


def dns():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(PATIENCE)
        s.connect((target, 53))
        labels = b"".join(bytes([len(l)]) + l for l in (b"files", b"vendor", b"test"))
        s.send(b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0" + labels + b"\0\0\x01\0\x01")
        answer = s.recv(512)
        return answer[3] & 0xF == 0 and answer[6:8] == b"\0\x01"


def served():
    try:
        return {"proxy": proxy, "dns": dns}[kind]()
    except OSError:
        return False


out, until = {"lost": 0, "back": 0, "refused": 0}, now() + int(seconds * 1e9)
while now() < until:
    ok = served()
    if ok and not os.path.exists("served"):
        open("served", "w").close()
    if not ok and os.path.exists("killing"):
        out["lost"], out["refused"] = out["lost"] or now(), out["refused"] + 1
    if ok and out["lost"]:
        out["back"] = now()
        break
print(json.dumps(out))
