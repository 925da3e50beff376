package clients

import (
	"fmt"
	"testing"

	"tagout/internal/reason"
)

const (
	inspected   = "https://registry.vendor.test"
	uninspected = "https://mirror.vendor.test"
	plain       = "http://registry.vendor.test"
	evil        = "https://evil.test"
)

func curl(t *testing.T, w *world) {
	w.try(t, []attempt{
		{name: "inspected", line: "curl -sS -w '%{http_version}' " + inspected + "/hello.txt", want: "hello from registry.vendor.test\n2", agent: "curl/"},
		{name: "not inspected", line: "curl -sS --cacert $CA -w '%{http_version}' " + uninspected + "/hello.txt", want: "hello from mirror.vendor.test\n2", agent: "curl/"},
		{name: "HTTP/1.1", line: "curl -sS --http1.1 -w '%{http_version}' " + inspected + "/hello.txt", want: "hello from registry.vendor.test\n1.1", agent: "curl/"},
		{name: "plain", line: "curl -sS " + plain + "/hello.txt", want: "hello from registry.vendor.test", agent: "curl/"},
		{name: "explicit, inspected", line: "curl -sS -x $PROXY " + inspected + "/hello.txt", want: "hello from registry.vendor.test", agent: "curl/"},
		{name: "explicit, not inspected", line: "curl -sS -x $PROXY --cacert $CA " + uninspected + "/hello.txt", want: "hello from mirror.vendor.test", agent: "curl/"},
		{name: "explicit, plain", line: "curl -sS -x $PROXY " + plain + "/hello.txt", want: "hello from registry.vendor.test", agent: "curl/"},
		{name: "several megabytes", line: "curl -sS " + inspected + "/bytes/20000000 | wc -c", want: "20000000\n", agent: "curl/"},
		{name: "events", line: "curl -sSN " + inspected + "/events/3 | grep -c data", want: "3\n", agent: "curl/"},
		{name: "an event of a stream that never ends", line: "curl -sSN --max-time 2 " + inspected + "/events/0; test $? = 28", want: "data: 1\n", agent: "curl/"},
		{name: "an upload that is not inspected", line: "head -c 3000000 /dev/zero | curl -sS --cacert $CA --data-binary @- " + uninspected + "/upload", want: "3000000\n", agent: "curl/"},

		{name: "denied path", line: "curl -sS --fail-with-body " + inspected + "/secret", want: "path-not-allowed", code: reason.PathDenied, comm: "curl"},
		{name: "denied method", line: "curl -sS --fail-with-body -X DELETE " + inspected + "/hello.txt", want: "method-not-allowed", code: reason.MethodDenied, comm: "curl"},
		{name: "denied method, plain", line: "curl -sS --fail-with-body -d x " + plain + "/hello.txt", want: "method-not-allowed", code: reason.MethodDenied, comm: "curl"},
		{name: "denied path, explicit", line: "curl -sS --fail-with-body -x $PROXY " + plain + "/secret", want: "path-not-allowed", code: reason.PathDenied, comm: "curl"},
		{name: "an inspected upload", line: "head -c 3000000 /dev/zero | curl -sS --fail-with-body --data-binary @- " + inspected + "/upload", want: "not-allowed", code: reason.PathDenied, comm: "curl"},
		{name: "denied name", line: "curl -sS " + evil, want: "Could not resolve host: evil.test", code: reason.NameNotAllowed, comm: "curl"},
		{name: "denied name, explicit", line: "curl -sS -x $PROXY " + evil, want: "response 403", code: reason.NameNotAllowed, comm: "curl"},
		{name: "denied name, explicit and plain", line: "curl -sS --fail-with-body -x $PROXY http://evil.test/", want: "name-not-allowed", code: reason.NameNotAllowed, comm: "curl"},
		{name: "denied redirect", line: "curl -sSL " + inspected + "/redirect", want: "Could not resolve host: evil.test", code: reason.NameNotAllowed, comm: "curl"},
		{name: "another name in the hello", line: "curl -sSk --connect-to evil.test:443:mirror.vendor.test:443 " + evil, want: "unrecognized name", code: reason.SNIMismatch, comm: "curl"},
		{name: "denied port", line: "curl -sS " + uninspected + ":8443/", want: "Failed to connect", code: reason.PortNotAllowed, comm: "curl"},
	})
}

func wget(t *testing.T, w *world) {
	w.try(t, []attempt{
		{name: "inspected", line: "wget -nv -O - " + inspected + "/hello.txt", want: "hello from registry.vendor.test", agent: "wget/"},
		{name: "not inspected", line: "wget -nv -O - --ca-certificate=$CA " + uninspected + "/hello.txt", want: "hello from mirror.vendor.test", agent: "wget/"},
		{name: "plain", line: "wget -nv -O - " + plain + "/hello.txt", want: "hello from registry.vendor.test", agent: "wget/"},
		{name: "explicit, inspected", line: "https_proxy=$PROXY wget -nv -O - " + inspected + "/hello.txt", want: "hello from registry.vendor.test", agent: "wget/"},
		{name: "denied path", line: "wget -nv -O - --content-on-error " + inspected + "/secret", want: "path-not-allowed", code: reason.PathDenied, comm: "wget"},
		{name: "denied method", line: "wget -nv -O - --content-on-error --post-data=x " + inspected + "/hello.txt", want: "method-not-allowed", code: reason.MethodDenied, comm: "wget"},
		{name: "denied path, plain", line: "wget -nv -O - " + plain + "/secret", want: "ERROR 403", code: reason.PathDenied, comm: "wget"},
		{name: "denied name", line: "wget -nv -t 1 -O - " + evil, want: "unable to resolve host address", code: reason.NameNotAllowed, comm: "wget"},
		{name: "denied name, explicit", line: "https_proxy=$PROXY wget -nv -t 1 -O - " + evil, want: "Proxy tunneling failed: Forbidden", code: reason.NameNotAllowed, comm: "wget"},
	})
}

// busybox has openssl speak TLS: that is the process in the records.
func busybox(t *testing.T, w *world) {
	const get = "busybox wget -O - "
	w.try(t, []attempt{
		{name: "inspected", line: get + inspected + "/hello.txt", want: "hello from registry.vendor.test", agent: "wget"},
		{name: "not inspected", line: "SSL_CERT_FILE=$CA " + get + uninspected + "/hello.txt", want: "hello from mirror.vendor.test", agent: "wget"},
		{name: "plain", line: get + plain + "/hello.txt", want: "hello from registry.vendor.test", agent: "wget"},
		{name: "explicit, plain", line: "http_proxy=$PROXY " + get + plain + "/hello.txt", want: "hello from registry.vendor.test", agent: "wget"},
		{name: "denied path", line: get + inspected + "/secret", want: "403", code: reason.PathDenied, comm: "openssl"},
		{name: "denied path, plain", line: get + plain + "/secret", want: "403", code: reason.PathDenied, comm: "busybox"},
		{name: "denied name", line: get + evil, want: "bad address 'evil.test'", code: reason.NameNotAllowed, comm: "busybox"},
		{name: "denied name, explicit", line: "http_proxy=$PROXY " + get + "http://evil.test/", want: "403", code: reason.NameNotAllowed, comm: "busybox"},
	})
}

func python(t *testing.T, w *world) {
	urllib := func(call string) string {
		return "python3 -c 'import urllib.request as u, urllib.error as e, sys\ntry: print(u.urlopen(" + call + ").read().decode())\n" +
			"except e.HTTPError as x: print(x, x.read().decode()); sys.exit(1)'"
	}
	client := func(host, method, path string) string {
		return fmt.Sprintf("python3 -c 'import http.client as h, sys\nc = h.HTTPSConnection(%q)\nc.request(%q, %q, headers={\"User-Agent\": \"http.client\"})\n"+
			"r = c.getresponse()\nprint(r.status, r.read().decode()); sys.exit(r.status >= 400)'", host, method, path)
	}
	w.try(t, []attempt{
		{name: "inspected", line: urllib(`"` + inspected + `/hello.txt"`), want: "hello from registry.vendor.test", agent: "python-urllib"},
		{name: "not inspected", line: "SSL_CERT_FILE=$CA " + urllib(`"`+uninspected+`/hello.txt"`), want: "hello from mirror.vendor.test", agent: "python-urllib"},
		{name: "plain", line: urllib(`"` + plain + `/hello.txt"`), want: "hello from registry.vendor.test", agent: "python-urllib"},
		{name: "explicit, inspected", line: "https_proxy=$PROXY " + urllib(`"`+inspected+`/hello.txt"`), want: "hello from registry.vendor.test", agent: "python-urllib"},
		{name: "http.client, inspected", line: client("registry.vendor.test", "GET", "/hello.txt"), want: "200 hello", agent: "http.client"},
		{name: "http.client, not inspected", line: "SSL_CERT_FILE=$CA " + client("mirror.vendor.test", "GET", "/hello.txt"), want: "200 hello", agent: "http.client"},
		{name: "denied path", line: urllib(`"` + inspected + `/secret"`), want: "path-not-allowed", code: reason.PathDenied, comm: "python3"},
		{name: "denied method", line: urllib(`"` + inspected + `/hello.txt", b"x"`), want: "method-not-allowed", code: reason.MethodDenied, comm: "python3"},
		{name: "denied name", line: urllib(`"` + evil + `"`), want: "name resolution", code: reason.NameNotAllowed, comm: "python3"},
		{name: "denied name, explicit", line: "https_proxy=$PROXY " + urllib(`"`+evil+`"`), want: "Tunnel connection failed: 403", code: reason.NameNotAllowed, comm: "python3"},
		{name: "http.client, denied method", line: client("registry.vendor.test", "PUT", "/hello.txt"), want: "method-not-allowed", code: reason.MethodDenied, comm: "python3"},
	})
}

func node(t *testing.T, w *world) {
	fetch := func(args string) string {
		return "node -e 'fetch(" + args + ").then(async r => { console.log(r.status, await r.text()); process.exitCode = r.ok ? 0 : 1 })" +
			".catch(e => { console.log(String(e), String(e.cause)); process.exitCode = 1 })'"
	}
	w.try(t, []attempt{
		{name: "inspected", line: fetch(`"` + inspected + `/hello.txt"`), want: "200 hello from registry.vendor.test", agent: "node"},
		{name: "not inspected", line: "NODE_EXTRA_CA_CERTS=$CA " + fetch(`"`+uninspected+`/hello.txt"`), want: "200 hello from mirror.vendor.test", agent: "node"},
		{name: "plain", line: fetch(`"` + plain + `/hello.txt"`), want: "200 hello from registry.vendor.test", agent: "node"},
		{name: "denied path", line: fetch(`"` + inspected + `/secret"`), want: "path-not-allowed", code: reason.PathDenied, comm: "node"},
		{name: "denied method", line: fetch(`"` + inspected + `/hello.txt", {method: "POST", body: "x"}`), want: "method-not-allowed", code: reason.MethodDenied, comm: "node"},
		{name: "denied name", line: fetch(`"` + evil + `"`), want: "getaddrinfo", code: reason.NameNotAllowed, comm: "node"},
	})
}

func goClient(t *testing.T, w *world) {
	const fetch = "/workspace/hostile fetch "
	w.try(t, []attempt{
		{name: "inspected", line: fetch + "GET " + inspected + "/hello.txt", want: "HTTP/2.0 200 OK\nhello from registry.vendor.test", agent: "go-http-client"},
		{name: "not inspected", line: "SSL_CERT_FILE=$CA " + fetch + "GET " + uninspected + "/hello.txt", want: "HTTP/2.0 200 OK\nhello from mirror.vendor.test", agent: "go-http-client"},
		{name: "plain", line: fetch + "GET " + plain + "/hello.txt", want: "hello from registry.vendor.test", agent: "go-http-client"},
		{name: "explicit, inspected", line: "HTTPS_PROXY=$PROXY " + fetch + "GET " + inspected + "/hello.txt", want: "hello from registry.vendor.test", agent: "go-http-client"},
		{name: "denied path", line: fetch + "GET " + inspected + "/secret", want: "path-not-allowed", code: reason.PathDenied, comm: "hostile"},
		{name: "denied method", line: fetch + "PATCH " + inspected + "/hello.txt", want: "method-not-allowed", code: reason.MethodDenied, comm: "hostile"},
		{name: "denied name", line: fetch + "GET " + evil, want: "lookup evil.test", code: reason.NameNotAllowed, comm: "hostile"},
		{name: "denied name, explicit", line: "HTTPS_PROXY=$PROXY " + fetch + "GET " + evil, want: "Forbidden", code: reason.NameNotAllowed, comm: "hostile"},
	})
}
