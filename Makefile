# Two commands do all the set-up on a fresh Debian machine (README.md); `make demo` and `make test` call
# `make setup` themselves, so that neither is ever needed by hand.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

BIN := build/bin
CMDS := tagout sandboxd proxy dnsfilter credd killswitchd kid-init hostile chat
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
RACEPKGS := ./proxy ./dnsfilter ./killswitch ./sandboxd/events ./sandboxd/sockwatch $(addprefix ./internal/,alert audit auditstream auditview card config \
	control credential execsocket instance leased policy provider session suggest tally vaddr)
FUZZTIME ?= 10m
LIVES ?= 1000
FOR ?= 30m
KILLS ?= 200
export CGO_ENABLED ?= 0

.PHONY: build setup demo test test-race soak-kids soak-stop soak-egress soak-audit soak-credentials bench bench-audit bench-egress bench-kids bench-stop bench-credentials lint generate openapi schema check-generated fuzz clean

build: ## Build every binary, static, into build/bin
	@mkdir -p $(BIN)
	go build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ $(addprefix ./cmd/,$(CMDS))

setup: ## Install the Debian packages that Tagout runs on (runc, iptables, mmdebstrap)
	@deploy/setup.sh

demo: setup build ## Run the main job: spawn, contain, stop, prove
	$(BIN)/tagout demo --bin-dir $(BIN) --json build/demo.json

test: setup build ## Run all tests, the privileged ones too when run as root
	@deploy/setup.sh test
	TAGOUT_BIN=$(CURDIR)/$(BIN) go test $(TESTFLAGS) -timeout 14m ./...

.PHONY: test-openbao
test-openbao: ## Lease users of a real Redis from a real OpenBao or Vault, whose binary BAO names
	@deploy/setup.sh openbao
	BAO=$(BAO) go test -tags openbao -count=1 -timeout 10m -v -run '^TestRealOpenBao' ./internal/provider

test-race: ## Run the tests of the packages that need no kernel under the race detector (needs gcc)
	CGO_ENABLED=1 go test -race -timeout 14m $(RACEPKGS)

soak-kids: setup build ## Let LIVES kids (default 1000) live at random while sandboxd is killed, and see that nothing is left
	TAGOUT_BIN=$(CURDIR)/$(BIN) TAGOUT_SOAK=$(LIVES) go test -count=1 -timeout 3h -v -run '^TestRandomLives$$' ./internal/e2e

soak-stop: setup build ## Run the stop cases at full size (16 GiB), and with this machine's clock set an hour forward for moments
	@deploy/setup.sh test
	TAGOUT_BIN=$(CURDIR)/$(BIN) go test -count=1 -timeout 30m -v -run '^(TestStopCases|TestTokensExpire)$$' ./internal/e2e -stop.heavy -stop.wallclock

soak-egress: setup build ## Run the egress load cases at full size: 10,000 at once, and 10 GB through one tunnel in FOR (default 30m)
	TAGOUT_BIN=$(CURDIR)/$(BIN) go test -count=1 -timeout 3h -v -run '^TestEgressCases$$/^E2[56]' ./internal/e2e -egress.heavy -egress.for=$(FOR)

soak-credentials: setup build ## Use brokered secrets for FOR (default 30m; 1h is an hour), then look for them everywhere
	TAGOUT_BIN=$(CURDIR)/$(BIN) go test -count=1 -timeout 3h -v -run '^TestSecretsNeverShow$$' ./internal/e2e -credentials.for=$(FOR)

soak-audit: ## Kill a process that writes an audit log KILLS times (default 200) at random, and see that no acknowledged record is lost
	go test -count=1 -timeout 30m -v -run '^TestNoAcknowledgedRecordIsLost$$' ./internal/audit -audit.kills=$(KILLS)

bench-audit: setup build ## Measure the audit logs beside an fsync a line and beside rsyslog (build/bench/audit.json)
	@deploy/setup.sh bench-audit
	$(BIN)/tagout bench audit --out build/bench

bench-egress: setup build ## Measure the road out beside squid, smokescreen, dnsmasq and others (build/bench/egress.json)
	@deploy/setup.sh bench
	go build -trimpath -o build/peers/ ./internal/bench/peers/...
	$(BIN)/tagout bench egress --bin-dir $(BIN) --peers build/peers --out build/bench

bench-stop: setup build ## Measure stops beside cgroup.kill, docker kill and podman kill (build/bench/stop.json)
	@deploy/setup.sh bench-stop
	$(BIN)/tagout bench stop --bin-dir $(BIN) --out build/bench

bench-kids: setup build ## Measure spawns, commands and idle kids beside runc and docker (build/bench/kids.json)
	@deploy/setup.sh bench-stop
	$(BIN)/tagout bench kids --bin-dir $(BIN) --out build/bench

bench-credentials: setup build ## Measure live tokens and their revocation beside Redis (build/bench/credentials.json)
	@deploy/setup.sh bench-credentials
	$(BIN)/tagout bench credentials --bin-dir $(BIN) --out build/bench

bench: setup build ## Measure what is promised; prints a table and writes build/bench/*.json
	$(BIN)/tagout bench --bin-dir $(BIN) --out build/bench

lint: ## gofmt, go vet, staticcheck: the tools are pinned in go.mod
	@bad=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$bad" ]; then echo "not gofmt-ed: $$bad"; exit 1; fi
	go vet ./...
	go tool staticcheck ./...

generate: ## Compile the BPF programs (needs clang, llvm, libbpf-dev)
	@deploy/setup.sh generate
	go generate ./bpf/...

openapi: ## Write the HTTP API's description from the code
	go run ./cmd/tagout openapi > deploy/schema/openapi.json

schema: ## Write the events and reasons of the code into the audit log's schema
	go test -count=1 ./internal/audit -run TestSchemaIsThatOfRecords -update

check-generated: generate ## Fail when the committed BPF objects are not what the sources give
	git diff --exit-code -- bpf

fuzz: ## Fuzz every parser of hostile bytes, FUZZTIME each (default 10m)
	@for file in $$(git grep -l '^func Fuzz' -- '*_test.go'); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\)(.*/\1/p' $$file); do \
			echo "fuzzing $$target in $$(dirname $$file) for $(FUZZTIME)"; \
			go test ./$$(dirname $$file) -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME); \
		done; \
	done

clean:
	rm -rf build
