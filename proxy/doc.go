// Package proxy is a kid's only road out. Three ways lead in: connections that the firewall sends here
// (transparent), CONNECT, and absolute-form HTTP (explicit). All three meet in one decision: source address ->
// session, destination -> name, policy -> rule. What the rule says then decides how the connection is spoken:
//
//	tcp             relayed as it is, by splice(2)
//	tls             the ClientHello is read and must name the host; then relayed, never decrypted
//	tls, inspected  ended here with a certificate of the instance's CA; every request is judged
//	http            every request is judged
//
// Promised: nothing is dialled for a sender without a session, an address without a name, a name without a
// rule, or bytes that are not what the rule says (invariants 1 and 2); every attempt leaves a record
// (invariant 7); a session that is taken away loses its connections before Remove returns; a token is looked
// up for every single use, and its value is never logged and soon forgotten (invariant 3); a token in any place
// of a judged request in which it is not swapped goes no further.
//
// Not promised: what an un-inspected TLS connection carries, beyond the name in its ClientHello; that a server
// which is sent a secret keeps it to itself. Copies of a secret in an answer are masked where they come back
// in clear, which helps against echoes, not against a hostile server.
package proxy
