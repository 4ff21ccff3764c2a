"""A few thousand common English words, made of base words and their regular forms.

The base words were written down for this project by subject, none is taken from a data set.
"""

from __future__ import annotations

from training.words import words_of

NOUNS = words_of("""
ability, accident, account, act, action, activity, actor, addition, address, adult, advantage, adventure, age, agency,
agreement, airport, album, alarm, alphabet, amount, angle, animal, apartment, appointment, argument, arm, army, arrow,
article, artist, attack, attempt, attention, aunt, author, autumn, award, baby, ball, balloon, band, bank, bar,
barrel, base, basket, bath, battery, battle, bay, beam, bean, beard, beat, bed, bedroom, beginning, bell, belt, bench,
bicycle, bill, birthday, biscuit, bit, blade, block, board, bone, bonus, boss, bottle, bottom, bowl, box, boy, brain,
branch, brand, break, breakfast, breath, brick, bridge, brother, brush, budget, bug, builder, building, button, buyer,
cabin, cable, cage, calendar, camp, campaign, canal, candidate, capital, captain, card, career, carpet, carrot,
cartoon, castle, category, cause, ceiling, cell, cent, centre, century, chain, challenge, champion, chance, channel,
chapter, character, charge, chart, chest, chicken, chief, choice, circle, citizen, class, classroom, clerk, client,
cliff, climate, cloth, club, clue, coach, coast, collar, colleague, collection, college, column, command, comment,
committee, competition, computer, concept, concert, condition, conference, connection, contact, content, contest,
contract, control, copy, corn, corner, cost, cottage, couch, council, counter, country, county, couple, course, court,
cousin, cover, cream, creature, credit, crime, crowd, crown, culture, cup, cupboard, curtain, curve, cushion,
customer, cycle, damage, dance, danger, date, daughter, day, deal, death, debate, debt, decade, decision, degree,
delay, demand, department, deposit, design, desk, detail, device, diamond, diary, dictionary, diet, difference,
difficulty, dinner, direction, director, discount, discovery, discussion, disease, dish, disk, distance, district,
doctor, document, dollar, door, dot, doubt, dozen, draft, drawer, dress, drink, drop, drum, duty, ear, earthquake,
economy, edge, editor, effect, effort, egg, election, element, elevator, emotion, employee, employer, end, enemy,
entrance, entry, envelope, environment, episode, era, escape, essay, event, exam, example, exchange, exercise, exit,
experience, experiment, expert, explanation, expression, extent, eye, fact, factor, factory, failure, fall, fan,
fashion, father, fault, favour, fear, feature, fee, feeling, fellow, fence, festival, fever, field, fight, figure,
film, finger, finish, flat, flavour, flight, floor, folder, form, formula, fortune, foundation, fountain, frame,
freedom, fridge, front, fruit, fuel, function, fund, future, gallery, gap, garage, gas, gate, gift, glove, goal,
grade, grain, grandfather, graph, ground, group, growth, guard, guess, guest, guide, habit, hair, hall, hammer,
handle, harm, heart, heat, heaven, height, hero, hint, hip, hobby, hole, holiday, honour, hook, hope, horn, hospital,
hotel, husband, ice, image, impact, income, increase, industry, ink, insect, instance, instrument, insurance,
interest, interview, iron, item, jacket, jam, jar, job, joke, journey, judge, juice, jury, keyboard, kick, kid, kilo,
kilometre, knee, knock, knot, label, lab, lady, land, language, laptop, laugh, law, lawyer, layer, leader, lecture,
leg, length, lesson, lid, lift, limit, link, lip, liquid, litre, load, loan, location, lock, log, look, loss, lunch,
machine, magazine, magic, mail, majority, manager, manner, mark, market, marriage, master, match, material, matter,
meal, meaning, measure, meat, medicine, meeting, memory, menu, message, metal, method, metre, middle, midnight, mile,
million, mind, mine, minister, minority, mirror, miss, mission, mistake, mix, mixture, mode, moment, morning, motion,
motor, mouth, move, movement, movie, muscle, mystery, nail, nation, nature, neck, need, neighbour, nerve, nest, net,
network, newspaper, night, noise, noon, nose, note, notebook, notice, novel, object, ocean, offer, officer, oil,
operation, opinion, opportunity, opposite, option, order, owner, oven, pace, pack, package, page, pain, paint,
painting, pair, palace, pan, panel, parade, parcel, park, partner, passage, passenger, passport, past, path, pattern,
pause, payment, peak, penny, percent, performance, period, permission, phone, photo, phrase, piano, picture, piece,
pile, pin, pipe, pitch, planet, plastic, platform, player, pleasure, pocket, poem, poet, policy, pool, population,
port, position, post, pot, potato, pound, powder, practice, prayer, president, press, pressure, price, pride, priest,
prince, principle, prison, prize, problem, process, product, profit, program, progress, project, promise, proof,
property, protest, public, pump, pupil, purpose, puzzle, quality, quantity, quarter, race, radio, rail, railway,
range, rank, rate, reader, reality, receipt, recipe, record, region, relation, relationship, religion, reply, report,
request, respect, response, restaurant, rhythm, ride, rise, risk, role, roll, room, root, route, row, rule, ruler,
rush, sack, sail, sale, sample, sandwich, scale, scene, schedule, scheme, science, score, screen, screw, script, seat,
second, secret, section, security, seed, sense, sentence, session, shape, share, sheet, shirt, shock, shoe, shop,
shore, shot, shoulder, shout, shower, sign, signal, singer, sister, site, situation, size, skill, skin, skirt, sleep,
slice, slip, smell, smile, smoke, society, sock, soil, soldier, solution, son, sort, sound, source, space, speaker,
speech, speed, spirit, spot, square, stage, stair, stamp, standard, start, state, statement, station, statue, step,
stick, store, stranger, stream, strength, stress, structure, student, style, subject, success, suggestion, suit, sum,
supper, supply, support, surface, surprise, survey, sweater, switch, symbol, table, tail, talk, tank, tap, tape,
target, task, taste, tax, taxi, team, tear, technique, telephone, television, temper, temperature, temple, tent, term,
text, theatre, theory, thought, thread, threat, throat, thumb, ticket, tie, title, toe, tone, tongue, tool, topic,
total, touch, tour, tourist, towel, town, track, trade, tradition, trail, trap, travel, treat, trick, trip, trouble,
truck, trust, truth, tube, tunnel, turn, type, tyre, uncle, union, unit, universe, university, user, vacation, value,
vegetable, vehicle, version, victim, victory, video, view, visit, visitor, voice, volume, vote, voyage, wage, waiter,
war, warning, waste, watch, wave, way, website, wedding, weekend, weight, wing, winner, wire, wish, witness, wonder,
worker, world, worry, wound, writer, yard, youth, zone, zoo
""")

VERBS = words_of("""
accept, achieve, act, add, admire, admit, advise, agree, aim, allow, announce, annoy, answer, apologise, argue,
arrange, arrest, arrive, attach, attend, avoid, bake, balance, beg, behave, belong, blink, boil, borrow, bounce, bow,
breathe, brush, bury, calculate, call, cancel, carry, celebrate, change, charge, chase, cheat, check, cheer, clap,
clean, clear, climb, close, collect, combine, compare, compete, complain, complete, confirm, confuse, connect,
contain, cook, correct, cough, count, crash, crawl, cross, cry, cure, damage, dance, dare, decide, declare, decorate,
defend, delete, deliver, depend, describe, deserve, develop, disagree, disappear, discover, discuss, divide, double,
doubt, drag, dress, drop, dry, earn, echo, edit, educate, enjoy, enter, entertain, escape, examine, excite, excuse,
exist, explain, explore, express, extend, face, fade, fail, fasten, fetch, fill, fit, fix, float, flow, fold, force,
form, frighten, gather, glow, grab, greet, guard, guess, handle, happen, hate, heal, heat, hope, hug, hunt, hurry,
identify, ignore, imagine, improve, include, inform, insist, install, instruct, intend, introduce, invent, invite,
join, joke, jump, kick, knit, knock, land, last, laugh, launch, lift, like, limit, listen, live, load, lock, look,
manage, march, mark, match, matter, measure, melt, mention, miss, mix, move, multiply, name, need, nod, note, notice,
obey, object, observe, obtain, occur, open, order, organise, owe, own, pack, park, pass, pause, perform, phone, pick,
plan, please, point, polish, pour, practise, praise, pray, prefer, prepare, present, press, pretend, prevent, print,
produce, promise, protect, prove, pull, punish, push, question, race, reach, realise, receive, recognise, record,
reduce, refuse, regret, reject, relax, release, rely, remain, remind, remove, rent, repair, repeat, replace, reply,
report, request, rescue, respect, return, review, roll, rub, ruin, rush, save, scare, scratch, search, select,
separate, serve, settle, shape, share, shout, sigh, sign, skip, slip, smell, smile, smoke, sneeze, solve, sound,
spell, spill, stare, start, stay, step, stir, stop, store, stretch, subtract, succeed, suffer, suggest, supply,
support, suppose, surprise, switch, talk, taste, test, thank, tidy, tie, touch, train, translate, treat, trust, try,
turn, type, unite, update, use, visit, vote, wait, walk, wander, want, warn, wash, waste, watch, wave, whisper,
whistle, wipe, wish, wonder, work, worry, wrap, yawn, yell
""")

IRREGULAR = words_of("""
clothes, pants, news, media, knife, shelf, thief, wife, foot, tooth, stomach, stomachs, loaf, wolf, half, am, is, are,
was, were, being, become, became, began, begun, bend, bent, bit, bitten, bite, bled, blew, blow, blown, bring,
brought, broke, broken, built, burn, burnt, burst, bought, came, catch, caught, chose, chosen, come, coming, cost,
crept, cut, cutting, dealt, did, doing, done, drank, drawn, dreamt, drew, drink, drive, driven, drove, drunk, dug,
eat, eaten, ate, fallen, fed, feed, fell, felt, fight, flew, fly, flown, forbid, forgave, forget, forgive, forgot,
forgotten, fought, found, freeze, froze, frozen, gave, get, getting, given, giving, go, goes, going, gone, got, grew,
grown, had, hang, having, heard, held, hid, hidden, hide, hit, hold, hung, hurt, keep, kept, kneel, knew, known, laid,
lay, lead, leapt, learnt, led, left, lend, lent, let, lie, lit, lost, lying, made, making, meant, met, paid, putting,
quit, ran, rang, read, ridden, ring, risen, rode, rose, rung, running, said, sang, sank, sat, saw, says, seeing, seek,
seen, sell, sending, sent, set, setting, shake, shaken, shine, shone, shook, shot, showed, shown, shrink, shut, sing,
sink, sitting, slept, slid, slide, sold, sought, sown, spent, spin, spoke, spoken, spread, sprang, spring, spun,
stand, standing, steal, stick, stole, stolen, stood, strike, struck, stuck, sung, swam, swear, sweep, swept, swim,
swing, swore, sworn, swum, swung, taken, taking, taught, tear, telling, think, thinking, thought, threw, throw,
thrown, told, took, tore, torn, understood, understanding, wake, waking, wear, wearing, weep, went, wept, win, wind,
woke, woken, won, wore, worn, write, writing, written, wrote, yes, no, maybe, please, thanks, sorry, okay, oh, hi,
hey, bye, goodbye, hello, welcome, dear, sir, madam, men, women, children, feet, teeth, mice, geese, knives, wives,
leaves, shelves, thieves, halves, lives, loaves, wolves, everybody, everyone, everything, somebody, someone,
something, anybody, anyone, anything, nobody, none, myself, yourself, himself, herself, itself, ourselves, themselves,
mine, yours, hers, ours, theirs, my, his, her, its, me, him, whom, whose, whoever, whatever, whenever, wherever,
either, neither, this, these, those, an, another, each, several, twice, although, though, unless, until, till, since,
whether, if, else, per, via, plus, minus, equal, upon, onto, toward, towards, across, along, around, among, behind,
beside, besides, beneath, beyond, despite, except, near, off, opposite, past, throughout, underneath, unlike, versus,
away, ago, ahead, apart, aside, somewhere, anywhere, everywhere, nowhere, today, tomorrow, yesterday, tonight,
sometimes, usually, ever, yet, still, already, almost, enough, even, perhaps, quite, rather, really, seldom, soon,
therefore, thus, together, too, well, however, indeed, instead, later, likely, meanwhile, nearly, otherwise,
eventually, alone, abroad, upstairs, downstairs, indoors, outdoors, backwards, forward, forwards, clockwise, zero,
hundred, thousand, million, billion, dozen, thirty, forty, fifty, sixty, seventy, eighty, ninety, once, thrice,
single, double, triple, third, quarter, foo, bar, baz, qux, lorem, ipsum, testing, check, alpha, beta, test, debug,
token, tokens, prompt, stream, cache, batch, input, output, null, json, http, api, id, url, user, system, assistant,
admin, root, sudo, boolean, array, integer, float, loop, variable, import, export, compile, kernel, thread, socket,
buffer, packet, router, browser, confidence, courage, dirt, dust, east, energy, evidence, existence, flour, fog, fun,
internet, joy, justice, knowledge, leather, luck, mud, north, nothing, peace, police, rice, rubber, safety, series,
silence, soap, software, south, steam, steel, technology, traffic, training, weather, west
""")

ADJECTIVES = words_of("""
able, absent, absolute, actual, afraid, alive, amazing, ancient, angry, annual, anxious, asleep, attractive,
automatic, available, average, aware, awake, awful, awkward, bare, basic, beautiful, big, bitter, blank, blind, bold,
boring, brief, broad, calm, capable, careful, careless, central, certain, charming, cheap, chemical, civil, classic,
clean, clear, close, cold, comfortable, common, complete, complex, constant, cool, correct, crazy, creative, cruel,
curly, current, cute, daily, dangerous, dark, dead, deaf, deep, delicate, delicious, different, difficult, digital,
dirty, distant, dramatic, dry, dull, eager, early, eastern, easy, elegant, empty, enormous, entire, exact, excellent,
excited, exciting, expensive, extra, extreme, fair, faithful, false, familiar, famous, fancy, fast, fat, final, fine,
firm, flat, flexible, foolish, foreign, formal, fortunate, free, frequent, fresh, front, frozen, full, furious,
general, generous, gentle, giant, glad, global, golden, good, grand, grateful, guilty, handsome, hard, harsh, healthy,
heavy, helpful, hidden, high, hollow, holy, honest, horrible, hot, huge, human, humble, ideal, ill, immediate,
important, impossible, impressive, incredible, independent, innocent, inner, intelligent, interesting, internal,
jealous, joint, joyful, junior, just, keen, kind, large, late, legal, lazy, light, likely, little, lively, local,
logical, lonely, long, loose, loud, lovely, low, loyal, lucky, mad, main, major, male, married, massive, mature,
maximum, medical, medium, mental, mere, mild, military, minimum, minor, missing, mobile, modern, modest, moral,
musical, mutual, mysterious, narrow, nasty, national, native, natural, naughty, neat, necessary, negative, nervous,
neutral, new, nice, noble, noisy, normal, northern, obvious, odd, official, online, only, ordinary, original, outer,
pale, partial, particular, patient, peaceful, perfect, permanent, personal, physical, plain, pleasant, polite, poor,
popular, positive, possible, powerful, practical, precious, present, pretty, previous, primary, prime, private,
probable, professional, proper, proud, pure, purple, quick, quiet, random, rapid, rare, raw, ready, real, reasonable,
recent, regular, relative, reliable, rich, ripe, rough, round, royal, rude, sad, safe, salty, scared, scary, secure,
senior, sensible, sensitive, separate, serious, severe, shallow, sharp, shiny, short, shut, sick, silent, silly,
similar, simple, sincere, single, slight, slim, slow, smart, smooth, social, soft, solar, solid, southern, spare,
special, specific, splendid, square, stable, steady, steep, stiff, straight, strange, strict, strong, stupid, sudden,
suitable, sunny, super, sure, sweet, swift, talented, tall, tame, tasty, technical, temporary, tender, terrible,
thick, thin, tidy, tight, tiny, tired, total, tough, tropical, true, typical, ugly, unable, unhappy, unique,
universal, unknown, unusual, upper, upset, urban, urgent, useful, useless, usual, vague, valid, valuable, various,
vast, violent, visible, visual, vital, warm, weak, wealthy, weekly, weird, western, wet, whole, wicked, wide, wild,
willing, wise, wonderful, wooden, worried, worse, worst, worth, wrong, yellow, young
""")

ADVERBS = words_of("""
absolutely, actually, angrily, automatically, awfully, badly, basically, bravely, briefly, brightly, calmly,
carefully, certainly, cheaply, clearly, closely, coldly, commonly, completely, constantly, correctly, currently,
deeply, directly, easily, entirely, equally, especially, exactly, extremely, fairly, finally, firmly, fortunately,
freely, frequently, fully, generally, gently, gladly, gradually, happily, hardly, heavily, highly, honestly,
hopefully, hungrily, immediately, kindly, largely, lately, lightly, loudly, luckily, mainly, mostly, naturally,
neatly, necessarily, nervously, nicely, noisily, normally, obviously, officially, originally, partly, patiently,
perfectly, personally, politely, poorly, possibly, practically, previously, probably, properly, proudly, quickly,
quietly, rapidly, rarely, recently, regularly, sadly, safely, secretly, seriously, sharply, silently, similarly,
simply, slightly, slowly, smoothly, softly, specially, steadily, strictly, strongly, suddenly, surely, terribly,
totally, truly, typically, unfortunately, warmly, weekly, widely, wildly, wisely, wonderfully
""")

GREEK = words_of("""
alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa, lambda, mu, nu, xi, omicron, pi, rho, sigma, tau,
upsilon, phi, chi, psi, omega
""")
NATO = words_of("""
alfa, bravo, charlie, delta, echo, foxtrot, golf, hotel, india, juliett, kilo, lima, mike, november, oscar, papa,
quebec, romeo, sierra, tango, uniform, victor, whiskey, x-ray, yankee, zulu
""")


_DOUBLED = {
    *words_of("admit, beg, clap, drag, drop, fit, grab, hug, knit, nod, occur, plan, prefer, regret, rub, skip, slip"),
    *words_of("cancel, step, stir, stop, travel, wrap"),
}  # the last consonant comes twice before -ed and -ing
_WITH_ES = {"echo", "hero", "potato", "tomato"}


def _ends_in_consonant_and_y(word: str) -> bool:
    return word[-1] == "y" and word[-2] not in "aeiou"


def _with_s(word: str) -> str:
    if word.endswith(("s", "x", "z", "ch", "sh")) or word in _WITH_ES:
        return word + "es"
    return word[:-1] + "ies" if _ends_in_consonant_and_y(word) else word + "s"


def _verb_forms(word: str) -> list[str]:
    stem = word[:-1] if word.endswith("e") and not word.endswith(("ee", "oe", "ye")) else word
    stem += word[-1] if word in _DOUBLED else ""
    past = word[:-1] + "ied" if _ends_in_consonant_and_y(word) else word + "d" if word.endswith("e") else stem + "ed"
    participle = word[:-2] + "ying" if word.endswith("ie") else stem + "ing"
    return [word, _with_s(word), past, participle]


COMMON_WORDS = sorted(
    {
        *NOUNS,
        *(_with_s(noun) for noun in NOUNS),
        *(form for verb in VERBS for form in _verb_forms(verb)),
        *IRREGULAR,
        *ADJECTIVES,
        *ADVERBS,
    }
)
"""All of them, in lower case, without the Greek letters and the spelling alphabet."""
