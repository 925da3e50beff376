"""Walks the steps on standard input, one after the other, from inside a kid. Prints an outcome a line.

A step says its kind and what that kind needs; bytes are base64. Nothing here waits for longer than PATIENCE,
and what ran into it says "timeout".
"""
import base64, errno, json, os, select, socket, ssl, sys, time

PATIENCE = 20


def word(e):
    if isinstance(e, TimeoutError):
        return "timeout"
    if isinstance(e, socket.gaierror):
        return "no such name"
    if isinstance(e, ssl.SSLError):
        return "TLS: " + str(e)
    return errno.errorcode.get(e.errno, str(e))


def chunks(step):
    return [base64.b64decode(c) for c in step.get("send") or []]


def talk(s, step, out):
    """Sends the chunks, each with a call of its own, and reads until the end or until what was waited for."""
    try:
        for c in chunks(step) + [bytes(step.get("fill") or 0)]:
            s.sendall(c)
        if step.get("shut"):
            s.shutdown(socket.SHUT_WR)
    except OSError as e:
        out["cut"] = word(e)
    data, size, until = b"", 0, base64.b64decode(step.get("until") or "")
    try:
        while True:
            part = s.recv(1 << 18)
            if not part:
                out["end"] = "eof"
                break
            size += len(part)
            if not step.get("drop"):
                data += part
            if step.get("any") or until and until in data:
                out["end"] = "found"
                break
    except OSError as e:
        out["end"] = word(e)
    out["data"], out["size"] = base64.b64encode(data).decode(), size


def dial(step):
    s = socket.create_connection((step["host"], step["port"]), PATIENCE)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def tcp(step, out):
    with dial(step) as s:
        talk(s, step, out)


def tls(step, out):
    """Speaks TLS with the trust that the kid's environment names."""
    ctx = ssl.create_default_context()
    if step.get("alpn"):
        ctx.set_alpn_protocols(step["alpn"])
    with dial(step) as raw, ctx.wrap_socket(raw, server_hostname=step.get("sni") or step["host"]) as s:
        out["alpn"] = s.selected_alpn_protocol() or ""
        talk(s, step, out)


def records(flight, n):
    """Cuts the handshake record that flight consists of into n records."""
    body = flight[5:]
    at = [i * len(body) // n for i in range(n + 1)]
    return b"".join(flight[:3] + (b - a).to_bytes(2, "big") + body[a:b] for a, b in zip(at, at[1:]))


def pieces(step, out):
    """A real handshake whose ClientHello comes in several records and many segments, checked to its end."""
    ctx = ssl.create_default_context()
    ctx.check_hostname, ctx.verify_mode = False, ssl.CERT_NONE  # who answers is the test's business, not the CA's
    inn, outt = ssl.MemoryBIO(), ssl.MemoryBIO()
    obj = ctx.wrap_bio(inn, outt, server_hostname=step["host"])
    with dial(step) as s:
        first = True
        while True:
            try:
                obj.do_handshake()
                break
            except ssl.SSLWantReadError:
                flight = outt.read()
                if first:
                    flight, first = records(flight, step["records"]), False
                    at = [i * len(flight) // step["segments"] for i in range(step["segments"] + 1)]
                    for a, b in zip(at, at[1:]):
                        s.sendall(flight[a:b])
                elif flight:
                    s.sendall(flight)
                part = s.recv(65536)
                if not part:
                    raise OSError(errno.EPIPE, "closed in the middle of the handshake")
                inn.write(part)
        out["end"] = obj.version()


def udp(step, out):
    family = socket.AF_INET6 if ":" in step["host"] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(PATIENCE)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for c in chunks(step):
            s.sendto(c, (step["host"], step["port"]))
        if step.get("any"):
            out["data"] = base64.b64encode(s.recv(65536)).decode()


def lookup(step, out):
    out["addrs"] = sorted({a[4][0] for a in socket.getaddrinfo(step["host"], step["port"], type=socket.SOCK_STREAM)})


def unix(step, out):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.connect(step["host"])


keep = []  # the crowd's served connections


def long(step, out):
    """Reads to the end, however long that takes, and only counts."""
    with dial(step) as s:
        s.settimeout(None)
        out["size"] = 0
        while part := s.recv(1 << 18):
            out["size"] += len(part)
        out["end"] = "eof"


def idle(step, out):
    """Has one byte echoed and leaves the connection alone until it is cut, or until told enough."""
    with dial(step) as s:
        s.sendall(b"x")
        s.recv(1)
        open("quiet", "w").close()
        while not os.path.exists("enough"):
            if select.select([s], [], [], 0.1)[0]:
                out["end"] = "eof" if not s.recv(1) else "more"
                return
        out["end"] = "kept"


def lookups(step, out):
    """Has many queries on the way at once, and asks again for what got lost: datagrams do."""
    out.update(served=0, refused=0, silent=0)
    (query,) = chunks(step)
    open_ids, until, again = set(range(step["count"])), time.monotonic() + PATIENCE, 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        s.connect((step["host"], step["port"]))
        while open_ids and time.monotonic() < until:
            if time.monotonic() >= again:
                for i in sorted(open_ids):
                    s.send(i.to_bytes(2, "big") + query[2:])
                again = time.monotonic() + 1
            s.settimeout(0.1)
            try:
                answer = s.recv(4096)
            except TimeoutError:
                continue
            i = int.from_bytes(answer[:2], "big")
            if i in open_ids:
                open_ids.remove(i)
                out["served" if answer[3] & 15 == 0 else "refused"] += 1
    out["silent"] = len(open_ids)


def wave(addr, n, out):
    """Opens n connections to an echo server at once and keeps those that are served."""
    poll, waiting, asked = select.epoll(), {}, set()
    for _ in range(n):
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex(addr)
        waiting[s.fileno()] = s
        poll.register(s, select.EPOLLOUT)
    until = time.monotonic() + PATIENCE
    while waiting and time.monotonic() < until:
        for fd, _ in poll.poll(1):
            s = waiting[fd]
            try:
                if fd not in asked:
                    s.send(b"x")
                    asked.add(fd)
                    poll.modify(fd, select.EPOLLIN)
                    continue
                if not s.recv(1):
                    raise OSError(errno.EPIPE, "closed")
                keep.append(s)
                out["served"] += 1
            except BlockingIOError:
                continue
            except OSError:
                s.close()
                out["refused"] += 1
            else:
                poll.unregister(fd)
            del waiting[fd]
    out["silent"] += len(waiting)


def crowd(step, out):
    """Opens many connections in waves, says in a file that all are settled, and holds them until told enough."""
    (addr,) = {a[4] for a in socket.getaddrinfo(step["host"], step["port"], socket.AF_INET, socket.SOCK_STREAM)}
    out.update(served=0, refused=0, silent=0)
    for _ in range(step["count"] // step["wave"]):
        wave(addr, step["wave"], out)
    open("settled", "w").close()
    while not os.path.exists("enough"):
        time.sleep(0.02)  # a look at a condition


for step in json.load(sys.stdin):
    out, began = {}, time.monotonic()
    try:
        if step["kind"] == "socket":
            socket.socket(step["family"], step["type"], step["proto"]).close()
        else:
            {"tcp": tcp, "tls": tls, "pieces": pieces, "udp": udp, "lookup": lookup, "unix": unix, "crowd": crowd,
             "long": long, "idle": idle, "lookups": lookups}[step["kind"]](step, out)
    except (OSError, UnicodeError) as e:
        out["error"] = word(e) if isinstance(e, OSError) else "no such name"
    out["took"] = time.monotonic() - began
    print(json.dumps(out), flush=True)
